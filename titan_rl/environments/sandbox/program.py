"""Program for the sandbox, its limits, and its outcome."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Ending = Literal["ok", "error", "timeout", "memory", "output"]
"""``error``: an exit code other than 0. ``timeout``, ``memory``, ``output``: the exceeded limit."""


class SandboxFailed(RuntimeError):
    """Failure of the sandbox, not of the program in it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program with all its child processes."""

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
    """Call of a program's function with plain values (values.py)."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """Python source, with calls of its functions after it has run."""

    source: str
    stdin: str = ""
    calls: tuple[Call, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class CallResult:
    """Result of a call: a plain value, or an error."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """End, output and call results of a program."""

    ending: Ending
    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str
    results: tuple[CallResult, ...] | None
    """One for each call; None unless the program ended well and gave all."""
    seconds: float
    memory: int
    """Peak in bytes."""


class Runner(Protocol):
    """Runner of programs: boxes here (pool.py), or a server (remote.py)."""

    async def run(self, program: Program) -> Outcome:
        """Run a program to its end. Errors: SandboxFailed."""
        ...
