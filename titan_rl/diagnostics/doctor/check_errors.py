"""Errors that end a check: a bug that it found, or nothing to look at."""


class CheckFailed(Exception):
    """A check found a bug: what is wrong, and the numbers that show it. ``mend``: of this one, in the check's place."""

    def __init__(self, message: str, evidence: str, mend: str = "") -> None:
        super().__init__(f"{message}: {evidence}")
        self.message, self.evidence, self.mend = message, evidence, mend


class CheckSkipped(Exception):
    """Check without an object or a method; the message has the reason."""
