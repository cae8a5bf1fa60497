"""Scripts that run inside bubblewrap, or at a server, where nothing else of titan_rl is."""
