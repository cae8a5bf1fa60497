"""Processes that are watched: deaths, hangs and deadlines by name."""
