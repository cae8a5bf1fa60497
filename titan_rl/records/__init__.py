"""What a run leaves on disk."""
