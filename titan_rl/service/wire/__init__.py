"""The Tinker API on the wire: requests read, answers written."""
