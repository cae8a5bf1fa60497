"""Benchmark of the watch page."""
