"""Benchmarks of weight transfer."""
