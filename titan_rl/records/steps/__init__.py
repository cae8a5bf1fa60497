"""Records of each step: rollouts, traces, rows that were trained or skipped."""
