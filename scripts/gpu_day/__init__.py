"""Stages of gpu_day.py: commands on a GPU, what is read off their logs and runs, and the figures that are wanted."""
