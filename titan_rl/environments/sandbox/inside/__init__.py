"""Scripts that run inside bubblewrap, where nothing else of titan_rl is."""
