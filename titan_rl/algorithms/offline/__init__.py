"""Algorithms that learn from a file: supervised, preferences, labels."""
