"""Hosts as jobs of Slurm, and a run that is submitted to it."""
