"""Checkpoints, non-finite batches, and how a run continues from what is recorded."""
