"""What a service keeps: checkpoints of adapters, and the record of training requests."""
