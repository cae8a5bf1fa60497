"""Algorithms that bound the ratio of policies otherwise than GRPO does."""
