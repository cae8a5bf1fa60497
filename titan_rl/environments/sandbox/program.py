"""A program for the sandbox, its limits, and what came of it."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Ending = Literal["ok", "error", "timeout", "memory", "output"]
"""``error``: an exit code other than 0. The others: what it had too much of."""


class SandboxFailed(RuntimeError):
    """The sandbox failed, not the program in it."""


@dataclass(frozen=True)
class Limits:
    """Of one program with all that it starts."""

    seconds: float = 5.0
    memory: int = 256 << 20
    """Bytes."""
    disk: int = 16 << 20
    """Bytes of its own, empty file system."""
    files: int = 256
    """On that file system."""
    processes: int = 16
    """Threads count."""
    output: int = 64 << 10
    """Bytes of standard output, of standard error, and of what its functions give, each."""


@dataclass(frozen=True)
class Call:
    """One of a program's functions and plain values for it (values.py)."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """Python source; after it has run, its functions are called."""

    source: str
    stdin: str = ""
    calls: tuple[Call, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class CallResult:
    """What a function gave: a plain value, or why there is none."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    ending: Ending
    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str
    results: tuple[CallResult, ...] | None
    """By each call; None unless the program came to its end and gave as many."""
    seconds: float
    memory: int
    """Bytes, the most that were seen."""


class Runner(Protocol):
    """Who runs programs: boxes here (pool.py), or a server (remote.py)."""

    async def run(self, program: Program) -> Outcome:
        """Errors: SandboxFailed."""
        ...
