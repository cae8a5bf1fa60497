"""The built-in tasks."""
