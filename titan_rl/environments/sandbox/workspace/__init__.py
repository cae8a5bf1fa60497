"""Workspaces: file systems of a task's own, in which an agent's commands run behind walls."""
