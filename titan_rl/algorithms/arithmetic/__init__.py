"""Advantages, returns, ratios and preferences as functions of numbers."""
