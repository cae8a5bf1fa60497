"""Algorithms that learn from rewards of sampled answers."""
