"""Command for a workspace, its limits, and its result."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

Ending = Literal["ok", "error", "timeout", "memory"]
"""``error``: an exit code other than 0. ``timeout``, ``memory``: the exceeded limit."""
MOST_COMMAND_BYTES = 100_000
"""The kernel takes no longer argument than 128 KiB."""


@dataclass(frozen=True)
class WorkspaceLimits:
    """Limits of one workspace."""

    seconds: float = 30.0
    """Of a command that brings no limit of its own."""
    memory: int = 512 << 20
    """Bytes of a command with all that it starts."""
    disk: int = 256 << 20
    """Bytes that are written since the workspace was opened or forked; they are memory."""
    files: int = 50_000
    processes: int = 64
    """Threads count."""
    output: int = 64 << 10
    """Bytes of a command's output that are kept: its beginning and its end."""


LIMITS = WorkspaceLimits()


@dataclass(frozen=True)
class Command:
    """Line for a workspace's shell (bash, where the image has it)."""

    line: str
    stdin: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """In which it runs; empty: the workspace's own."""
    seconds: float | None = None
    """Limit; None: the workspace's."""
    output: int | None = None
    """Bytes of its output that are kept; None: as many as the workspace keeps."""


@dataclass(frozen=True)
class CommandResult:
    """End and output of a command. What it had started has ended with it."""

    ending: Ending
    exit_code: int
    """128 and a signal's number where one ended it, as shells have it."""
    raw_output: bytes
    """Standard output and error, as they were written."""
    num_dropped: int
    """Bytes of output that were too many, between its beginning and its end."""
    seconds: float

    @property
    def output(self) -> str:
        """Output as text, with a line in the place of what was dropped."""
        if not self.num_dropped:
            return self.raw_output.decode(errors="replace")
        half = len(self.raw_output) // 2
        parts = (self.raw_output[:half], self.raw_output[half:])
        return f"\n[{self.num_dropped} bytes are left out here]\n".join(part.decode(errors="replace") for part in parts)


class WorkspaceSpoiled(RuntimeError):
    """What commands have left cannot be judged: their doing, and no fault of the sandbox."""


class Workspace(Protocol):
    """File system with a shell, for one caller at a time."""

    @property
    def folder(self) -> str:
        """In which commands run by default."""
        ...

    async def run(self, command: Command) -> CommandResult:
        """Run a command to its end.

        Errors: SandboxFailed; ValueError for a line that no shell can be given; WorkspaceSpoiled."""
        ...

    async def fork(self, port: int | None = None) -> "Workspace":
        """A workspace that begins with all that is in this one. ``port``: at which it listens for the host.

        Errors: SandboxFailed."""
        ...

    async def fork_folder(self) -> "Workspace":
        """A workspace that begins as this one did, but for the folder in which commands run.

        This one takes no command any more. Errors: SandboxFailed; WorkspaceSpoiled."""
        ...

    async def close(self) -> None:
        """End the workspace, with all that is in it."""
        ...
