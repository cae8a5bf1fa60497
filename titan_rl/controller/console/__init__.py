"""What a run writes to the terminal."""
