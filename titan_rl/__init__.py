"""Reinforcement-learning post-training of language models on a mesh of actors."""

import os

__version__ = "0.1.0"

# Monarch reads this once, when it is imported, and has no setting for it: how soon its supervision notices a fault.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
