"""What looks at, strikes or measures a run."""
