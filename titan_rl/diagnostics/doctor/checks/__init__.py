"""The checks of ``titan-rl doctor``, by subject."""
