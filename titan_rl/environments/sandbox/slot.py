"""One box from outside: a program at a time is handed in, watched, and what came of it read.

Everything that comes from a program is bytes from an enemy: bounded, and never more than decoded text and JSON.
"""

import array
import json
import math
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import TypedDict

from titan_rl.environments.sandbox.bubblewrap import command
from titan_rl.environments.sandbox.groups import Group, new_group
from titan_rl.environments.sandbox.program import Ending, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.seccomp import seccomp_filter
from titan_rl.environments.sandbox.told import BEGUN, Ended, as_task, outcome_of

_START_SECONDS = 20.0
_KILL_SECONDS = 0.8
"""From the order to kill to a report of it. Then the program has had its end, and its box is ended with it."""
_PIECE = 1 << 16


class Report(TypedDict):
    """What a box says of a program that has ended."""

    exit: int
    why: str
    seconds: float
    memory: int


class Slot:
    """Owns a box, and starts another where the last one is gone. One caller at a time, from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._group: Group | None = None

    def start(self) -> socket.socket:
        """The way to the box. Errors: SandboxFailed that says what bubblewrap said."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as seccomp, tempfile.TemporaryFile() as said:
            seccomp.write(seccomp_filter())
            seccomp.seek(0)
            numbers = theirs.fileno(), seccomp.fileno()
            line = command(*numbers)
            try:
                self._group = new_group()
                line = line if self._group is None else self._group.entered(line)
            except OSError as error:
                raise SandboxFailed(f"no control group for a box: {error}") from error
            # an empty environment: bubblewrap's own would be read by whoever is in the box
            self._process = subprocess.Popen(
                line, pass_fds=numbers, env={}, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            self._control = ours
            theirs.close()
            ours.settimeout(_START_SECONDS)
            try:
                is_ready = ours.recv(16) == b"ready"
            except OSError:
                is_ready = False
            if not is_ready:
                self.close()
                said.seek(0)
                lines = said.read(4096).decode(errors="replace").strip().splitlines()
                raise SandboxFailed(lines[-1] if lines else "the box said nothing")
        return ours

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def run(self, program: Program) -> Outcome:
        """Errors: SandboxFailed if the box is at fault; another one is started for the next program."""
        control = self._control
        if control is None or self._process is None or self._process.poll() is not None:
            self.close()
            control = self.start()
        run = _Run(control, program, self._group)
        try:
            return run.outcome()
        except (OSError, SandboxFailed) as error:
            self.close()
            raise SandboxFailed(str(error)) from error
        finally:
            if run.goes_on:
                self.close()


class _Run:
    """From the program to its outcome."""

    def __init__(self, control: socket.socket, program: Program, group: Group | None):
        self.control, self.program, self.limits, self.group = control, program, program.limits, group
        self.why: Ending | None = None
        """Why it was told to end."""
        self.goes_on = False
        """It was, and has not ended yet: what it has takes long to undo."""

    def outcome(self) -> Outcome:
        if self.group is not None:
            self.group.bound(self.limits)
        with ExitStack() as stack:
            self.task = self._hand_in(stack)
            self.received = {self.task.fileno(): b"", self.stdout: b"", self.stderr: b""}
            report = self._watch()
            for number in self.received:  # what had been written at the end: nobody is left to write more
                while self._receive(number) and not self.goes_on:
                    pass
        return self._told(report)

    def _hand_in(self, stack: ExitStack) -> socket.socket:
        """Three ways to and from the program, of which the box has the other ends."""
        task, theirs = socket.socketpair()
        stack.enter_context(task)
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        stack.callback(os.close, self.stdout)
        stack.callback(os.close, self.stderr)
        with theirs:
            limits = {name: getattr(self.limits, name) for name in ("seconds", "memory", "disk", "files", "processes")}
            try:
                numbers = array.array("i", [theirs.fileno(), out, err])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
                self.control.sendmsg([json.dumps(limits).encode()], ancillary)
            finally:
                os.close(out)
                os.close(err)
        self._unsent = memoryview(json.dumps(as_task(self.program)).encode())
        for number in (self.stdout, self.stderr):
            os.set_blocking(number, False)
        task.setblocking(False)
        return task

    def _watch(self) -> Report:
        """What the box reports at the end. Errors: SandboxFailed; OSError."""
        poll, task, control = select.poll(), self.task.fileno(), self.control.fileno()
        for number in (self.stdout, self.stderr, control):
            poll.register(number, select.POLLIN)
        wanted = select.POLLOUT if self._send() else 0
        # what is said there besides is "begun", which can wait: each time that this is woken takes others' time
        wanted |= select.POLLIN if self.program.calls else 0
        if wanted:
            poll.register(task, wanted)
        start = time.monotonic()
        deadline = start + self.limits.seconds
        report: Report | None = None
        while report is None:
            left = deadline - time.monotonic()
            if left <= 0:
                if self.why is not None:
                    self.goes_on = True
                    return Report(exit=-signal.SIGKILL, why=self.why, seconds=time.monotonic() - start, memory=0)
                self._end("timeout")
                deadline = time.monotonic() + _KILL_SECONDS
                continue
            for number, events in poll.poll(math.ceil(1000 * left)):
                if number == control:
                    report = self._take_report()
                    continue
                if events & select.POLLOUT and not self._send():
                    poll.modify(number, wanted & ~select.POLLOUT)
                if events & ~select.POLLOUT and self._receive(number) is False:
                    poll.unregister(number)
                if len(self.received[number]) > self.limits.output and self.why is None:
                    self._end("output")
                    deadline = time.monotonic() + _KILL_SECONDS
        return report

    def _end(self, why: Ending) -> None:
        self.why = why
        self.control.send(b"kill")

    def _take_report(self) -> Report:
        said = self.control.recv(4096)
        if not said:
            raise SandboxFailed("the box died")
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise SandboxFailed("the box said nonsense") from None

    def _send(self) -> bool:
        """Some more of the program; whether there is more to send."""
        with suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[self.task.send(self._unsent[:_PIECE]) :]
            except (BrokenPipeError, ConnectionResetError):  # it has ended without having read itself
                return False
        if self._unsent:
            return True
        with suppress(OSError):
            self.task.shutdown(socket.SHUT_WR)
        return False

    def _receive(self, number: int) -> bool | None:
        """False: no more will come; None: not now. What is beyond the limit is dropped."""
        try:
            part = os.read(number, _PIECE)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return False
        self.received[number] = (self.received[number] + part)[: self.limits.output + len(BEGUN) + 1]
        return bool(part)

    def _told(self, report: Report) -> Outcome:
        """Errors: SandboxFailed for a program that did not begin."""
        is_over = report["why"] == "memory" or (self.group is not None and self.group.has_ended_any())
        why = self.why or ("memory" if is_over else None)
        try:
            how = Ended(why, int(report["exit"]), float(report["seconds"]), int(report["memory"]))
        except (ValueError, TypeError, LookupError, OverflowError):
            raise SandboxFailed("the box has no report on a program") from None
        return outcome_of(self.program, how, *self.received.values())
