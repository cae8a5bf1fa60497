"""Monarch's private names, each module with no more imports than its names need."""
