"""The loop of a run on data: rows, steps, held-out loss."""
