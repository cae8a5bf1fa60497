"""Benchmarks of models: generation, kernels, model directories."""
