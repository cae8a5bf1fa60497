"""Process tables, deadlines, logs, fault injection."""
