"""Base classes of tasks, environments and scores."""
