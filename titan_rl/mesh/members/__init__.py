"""The members of a mesh by role: trainers, generators, verifiers."""
