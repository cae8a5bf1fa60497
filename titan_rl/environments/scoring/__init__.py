"""Scorer processes, and the reward model."""
