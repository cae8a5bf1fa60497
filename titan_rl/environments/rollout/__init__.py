"""Groups of rollouts, worked examples, and data sets made from tasks."""
