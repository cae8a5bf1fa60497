"""One box from outside: sends in a program at a time, watches it, and reads its outcome.

All bytes from a program are untrusted: bounded, and never more than decoded text and JSON.
"""

import array
import json
import math
import os
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress
from typing import TypedDict

from titan_rl.environments.sandbox.box_process import BoxProcess
from titan_rl.environments.sandbox.bubblewrap import command
from titan_rl.environments.sandbox.groups import Group, new_group
from titan_rl.environments.sandbox.program import Ending, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.program_report import BEGUN, ExitReport, as_task, outcome_of
from titan_rl.environments.sandbox.seccomp import seccomp_filter

_KILL_SECONDS = 0.8
"""From the order to kill to a report of it. Then the program has had its end, and its box is ended with it."""
_PIECE = 1 << 16


class Report(TypedDict):
    """Report of a box on an ended program."""

    exit: int
    why: str
    seconds: float
    memory: int


class Slot:
    """Owner of a box, restarted when it is gone. One caller at a time, from any thread."""

    def __init__(self) -> None:
        self._process: BoxProcess | None = None
        self._group: Group | None = None

    def start(self) -> BoxProcess:
        """Start the box. Errors: SandboxFailed with bubblewrap's message."""
        try:
            self._process = BoxProcess(self._command, seccomp_filter())
        except SandboxFailed:
            self.close()
            raise
        return self._process

    def _command(self, control: int, seccomp: int) -> list[str]:
        """Errors: SandboxFailed."""
        line = command(control, seccomp)
        try:
            self._group = new_group()
        except OSError as error:
            raise SandboxFailed(f"no control group for a box: {error}") from error
        return line if self._group is None else self._group.entry_command(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def run(self, program: Program) -> Outcome:
        """Run a program. Errors: SandboxFailed by the box's fault; the next program starts another."""
        process = self._process
        if process is None or process.has_ended:
            self.close()
            process = self.start()
        run = _Run(process.control, program, self._group)
        try:
            return run.outcome()
        except (OSError, SandboxFailed) as error:
            self.close()
            raise SandboxFailed(str(error)) from error
        finally:
            if run.is_still_running:
                self.close()


class _Run:
    """From the program to its outcome."""

    def __init__(self, control: socket.socket, program: Program, group: Group | None):
        self.control, self.program, self.limits, self.group = control, program, program.limits, group
        self.why: Ending | None = None
        """Reason of the order to kill it."""
        self.is_still_running = False
        """Whether it was killed and has not ended yet."""

    def outcome(self) -> Outcome:
        if self.group is not None:
            self.group.bound(self.limits)
        with ExitStack() as stack:
            self.task = self._send_program(stack)
            self.received = {self.task.fileno(): b"", self.stdout: b"", self.stderr: b""}
            report = self._watch()
            for number in self.received:  # what had been written at the end: nobody is left to write more
                while self._receive(number) and not self.is_still_running:
                    pass
        return self._outcome(report)

    def _send_program(self, stack: ExitStack) -> socket.socket:
        """Three ways to and from the program, of which the box has the other ends."""
        task, box_end = socket.socketpair()
        stack.enter_context(task)
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        stack.callback(os.close, self.stdout)
        stack.callback(os.close, self.stderr)
        with box_end:
            limits = {name: getattr(self.limits, name) for name in ("seconds", "memory", "disk", "files", "processes")}
            try:
                numbers = array.array("i", [box_end.fileno(), out, err])
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
        task_events = select.POLLOUT if self._send() else 0
        # what is said there besides is "begun", which can wait: each time that this is woken takes others' time
        task_events |= select.POLLIN if self.program.calls else 0
        if task_events:
            poll.register(task, task_events)
        start = time.monotonic()
        deadline = start + self.limits.seconds
        report: Report | None = None
        while report is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if self.why is not None:
                    self.is_still_running = True
                    return Report(exit=-signal.SIGKILL, why=self.why, seconds=time.monotonic() - start, memory=0)
                self._end("timeout")
                deadline = time.monotonic() + _KILL_SECONDS
                continue
            for number, events in poll.poll(math.ceil(1000 * remaining)):
                if number == control:
                    report = self._take_report()
                    continue
                if events & select.POLLOUT and not self._send():
                    poll.modify(number, task_events & ~select.POLLOUT)
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
        message = self.control.recv(4096)
        if not message:
            raise SandboxFailed("the box died")
        try:
            return json.loads(message)
        except (ValueError, RecursionError):
            raise SandboxFailed("invalid reply of the box") from None

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

    def _outcome(self, report: Report) -> Outcome:
        """Errors: SandboxFailed for a program that did not begin."""
        try:
            is_over = report["why"] == "memory" or (self.group is not None and self.group.has_ended_any())
            why = self.why or ("memory" if is_over else None)
            how = ExitReport(why, int(report["exit"]), float(report["seconds"]), int(report["memory"]))
        except (ValueError, TypeError, LookupError, OverflowError):
            raise SandboxFailed("the box has no report on a program") from None
        return outcome_of(self.program, how, *self.received.values())
