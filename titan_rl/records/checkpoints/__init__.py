"""Checkpoint folders and shard stores."""
