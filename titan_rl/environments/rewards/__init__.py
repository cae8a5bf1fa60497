"""Reward functions, and the LLM judge."""
