"""Benchmark of the forecasts of ``titan-rl plan``."""
