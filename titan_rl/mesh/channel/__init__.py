"""Tensors from actor to actor: weights, batches, snapshots."""
