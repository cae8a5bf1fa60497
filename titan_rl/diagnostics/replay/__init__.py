"""``titan-rl replay``: recorded steps, computed again and compared."""
