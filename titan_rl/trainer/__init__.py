"""One rank's training."""
