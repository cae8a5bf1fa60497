"""Processes, and the bytes between them."""
