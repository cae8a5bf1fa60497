"""``titan-rl eval``: a model on suites, without a run."""
