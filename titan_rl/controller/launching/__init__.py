"""Runs over several hosts that are submitted: what is written, then what is done with it."""
