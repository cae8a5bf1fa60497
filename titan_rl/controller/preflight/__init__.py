"""Checks before the first process starts."""
