"""Which rollouts make a batch, and with which rewards."""
