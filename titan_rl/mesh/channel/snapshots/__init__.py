"""Copies of trainer state in other hosts' memory."""
