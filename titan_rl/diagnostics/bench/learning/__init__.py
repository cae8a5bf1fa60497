"""Benchmarks of learning: held-out accuracy after training."""
