"""The loop, and what it needs to begin, to report and to end."""
