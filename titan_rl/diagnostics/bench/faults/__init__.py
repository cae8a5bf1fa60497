"""Benchmarks of faults: replacement, protection, sandbox, slow scorers."""
