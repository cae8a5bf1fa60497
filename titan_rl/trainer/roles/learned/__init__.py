"""Models that learn beside the policy: critics, implicit reward models and draft models."""
