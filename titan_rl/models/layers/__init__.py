"""Attention, feed-forward and embedding layers."""
