"""Checkpoints and snapshots of a rank."""
