"""Programs to write, judged by tests in a sandbox."""
