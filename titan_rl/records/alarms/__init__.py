"""Alarms on reward hacking and training health."""
