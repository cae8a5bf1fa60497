"""Benches of `titan-rl serve`."""
