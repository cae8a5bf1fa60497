"""Benchmarks of training steps."""
