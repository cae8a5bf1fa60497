"""The one kind of error that a user's mistake is."""


class ConfigError(ValueError):
    """A user's mistake: one line, exit code 2, nothing started."""
