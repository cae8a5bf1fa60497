"""The loop of reinforcement learning: rollouts, batches, steps, weight versions."""
