"""Tasks: prompts, environments and agents, scoring."""
