"""Process groups and ranks."""
