"""One command from outside: sent into its workspace, watched, its output read and bounded.

All bytes that come from a command are untrusted: bounded, and never more than text.
"""

import array
import fcntl
import json
import math
import os
import select
import socket
import time
from contextlib import ExitStack

from titan_rl.environments.sandbox.groups import Group
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import (
    MOST_COMMAND_BYTES,
    Command,
    CommandResult,
    Ending,
    WorkspaceLimits,
)

_BEGUN = b"!"
"""First byte of a description that was taken (inside/workspaces.py)."""
_KILL_SECONDS = 5.0
"""From the order to kill to a report of it."""
_PIECE = 1 << 16
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class BoundedOutput:
    """Beginning and end of an output."""

    def __init__(self, most: int):
        """``most``: bytes that are kept."""
        self._half = most // 2
        self._head, self._tail = bytearray(), bytearray()
        self.num_dropped = 0

    def add(self, part: bytes) -> None:
        room = self._half - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        if len(self._tail) > 2 * self._half + _PIECE:
            self._drop()

    def _drop(self) -> None:
        over = max(0, len(self._tail) - self._half)
        del self._tail[:over]
        self.num_dropped += over

    def kept(self) -> bytes:
        self._drop()
        return bytes(self._head + self._tail)


def run_command(
    control: socket.socket, arguments: list[str], command: Command, limits: WorkspaceLimits, group: Group | None
) -> CommandResult:
    """Run a command to its end. ``arguments``: the shell's. Errors: SandboxFailed; OSError for a lost workspace."""
    seconds = command.seconds or limits.seconds
    if group is not None:
        group.bound(limits)
    output = BoundedOutput(command.output or limits.output)
    with ExitStack() as stack:
        task = _memory(stack, json.dumps(_description(command, arguments)).encode())
        stdin = _memory(stack, command.stdin, _SEALS)
        ours, its = os.pipe()
        stack.callback(os.close, ours)
        try:
            numbers = array.array("i", [task, stdin, its])
            header = json.dumps({"seconds": seconds, "memory": limits.memory}).encode()
            control.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
        finally:
            os.close(its)
        report, is_late = _watch(control, ours, output, seconds)
        while part := _read(ours):  # what had been written at the end: nobody is left to write more
            output.add(part)
        if os.pread(task, 1, 0) != _BEGUN:
            raise SandboxFailed(f"a command did not begin: {output.kept().decode(errors='replace').strip()[:300]}")
    is_over = report.get("why") == "memory" or (group is not None and group.has_ended_any())
    exit_code = int(report["exit"])
    ending: Ending = "timeout" if is_late else "memory" if is_over else "error" if exit_code else "ok"
    return CommandResult(
        ending, exit_code if exit_code >= 0 else 128 - exit_code, output.kept(), output.num_dropped, report["seconds"]
    )


def check_line(line: str) -> None:
    """Errors: ValueError for a line that no shell can be given."""
    if "\0" in line:
        raise ValueError("a command has a NUL character")
    if (size := len(line.encode(errors="surrogateescape"))) > MOST_COMMAND_BYTES:
        raise ValueError(f"a command has {size} bytes, and {MOST_COMMAND_BYTES} are the most: write a file in parts")


def _description(command: Command, arguments: list[str]) -> dict:
    """Errors: ValueError."""
    check_line(command.line)
    return {
        "arguments": [*arguments, command.line],
        "environment": command.environment,
        "folder": command.folder,
    }


def _memory(stack: ExitStack, content: bytes, seals: int = 0) -> int:
    """Descriptor of a file in memory, at its beginning."""
    number = os.memfd_create("command", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    stack.callback(os.close, number)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    if seals:
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


def _watch(control: socket.socket, pipe: int, output: BoundedOutput, seconds: float) -> tuple[dict, bool]:
    """Report of the workspace at the end, and whether the command was killed for its time. Errors: SandboxFailed."""
    os.set_blocking(pipe, False)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(control, select.POLLIN)
    deadline, is_late = time.monotonic() + seconds, False
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            if is_late:
                raise SandboxFailed(f"a command did not end within {_KILL_SECONDS:g} s of being killed")
            control.send(b"kill")
            deadline, is_late = time.monotonic() + _KILL_SECONDS, True
            continue
        for number, _ in poll.poll(math.ceil(1000 * remaining)):
            if number == control.fileno():
                return read_report(control), is_late
            if part := _read(pipe):
                output.add(part)
            elif part is not None:
                poll.unregister(pipe)


def _read(pipe: int) -> bytes | None:
    """Empty: nobody will write any more; None: nothing is there now."""
    try:
        return os.read(pipe, _PIECE)
    except BlockingIOError:
        return None


def read_report(control: socket.socket) -> dict:
    """What a workspace says. Errors: SandboxFailed."""
    message = control.recv(1 << 16)
    if not message:
        raise SandboxFailed("the workspace died")
    report = json.loads(message)
    if "error" in report:
        raise SandboxFailed(str(report["error"])[:300])
    return report
