"""Models beside the policy: frozen ones, and those that learn."""
