"""Per-step timings, and stragglers."""
