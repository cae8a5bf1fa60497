"""Errors that end a command with one line: a mistake, a named fault, a complete run."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A user's mistake: one line, exit code 2, nothing started."""

    @property
    def findings(self) -> Sequence[str]:
        """A line for each mistake."""
        return [str(self)]


class ConfigErrors(ConfigError):
    """Several mistakes, each with a line of its own."""

    def __init__(self, findings: Sequence[str]):
        super().__init__("\n".join(findings))
        self._findings = list(findings)

    @property
    def findings(self) -> Sequence[str]:
        return self._findings


class NamedFault(RuntimeError):
    """Fault whose message names the cause, such as an exception of a user's reward: exit code 1, no traceback."""


class AlreadyComplete(Exception):
    """Run to resume that has ended as planned: one line, exit code 0, nothing started."""


def raise_findings(findings: Sequence[str]) -> None:
    """Errors: ConfigError of all findings; none without any."""
    if findings:
        raise ConfigErrors(findings) if len(findings) > 1 else ConfigError(findings[0])
