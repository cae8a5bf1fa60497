"""Reinforcement-learning post-training of language models on a mesh of actors."""
