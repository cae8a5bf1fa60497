"""Scoring in processes of its own, which a bad answer can hang or kill without hurting the run. Both ends.

    verifier ──"7 {...}"──▶ scoring process ──{...}──▶ worker, a fork of it that has one line at a time
             ◀─"7 {...}"──                  ◀─{...}──

A line is a request or its score (json_lines_process.py). A worker that hangs or dies takes no other answer with it,
and no scorer has to be thread-safe. Workers are forked as they are needed: while fewer of them compute than there are
cores, since scores that wait for a server cost nothing, and scores that compute would only be late for each other's
sake. Where none computes, as many lines more are handed out as are found to wait, so that a burst of them is soon
under way.
"""

import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

from titan_rl.config.load import ConfigError
from titan_rl.data.numbers import finite
from titan_rl.data.types import Status
from titan_rl.environments.conversation.json_lines_process import LineProcess, ProcessDied
from titan_rl.environments.interfaces.score import Score
from titan_rl.mesh.processes.deadlines import together
from titan_rl.mesh.processes.logs import write_each_line
from titan_rl.mesh.processes.processes import MARK, process_state
from titan_rl.mesh.resources.cores import available_cores

Answer = Callable[[dict[str, Any]], dict[str, Any]]

_START_SECONDS = 60.0
_ATTEMPTS = 3
_HANDED_ON = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", MARK)
"""The environment of a scoring process, beside its number of threads."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_PATROL_SECONDS = 0.4
_LOOK_SECONDS = 0.002
"""Between two looks at who computes, while lines wait."""
_LINE_BYTES = 1 << 20


# the verifier's end


class ScoringProcess(LineProcess):
    """Child process that scores many answers side by side."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        timeout: float,
        start_seconds: float = _START_SECONDS,
        secrets: Sequence[str] = (),
    ):
        """``command``: arguments of Python. ``timeout``: seconds for an answer, kept by the child itself.
        ``secrets``: further environment variables that are passed on."""
        environment = {key: os.environ[key] for key in (*_HANDED_ON, *secrets) if key in os.environ}
        super().__init__(
            name, (sys.executable, *command), environment | {"OMP_NUM_THREADS": "1"}, timeout, start_seconds
        )

    async def score_lines(self, lines: list[str]) -> tuple[list[Score], float]:
        """Score all lines side by side; gives the scores, and the seconds for all. Errors: RuntimeError when closed."""
        start = time.perf_counter()
        scores = await together(self._score(line) for line in lines)
        return scores, time.perf_counter() - start

    async def _score(self, line: str) -> Score:
        for _ in range(_ATTEMPTS):
            try:
                return read_score(await self.ask(line))
            except ProcessDied:  # with all that it had: no answer does that, so each is asked for again
                continue
        return Score("infra_error", {}, f"the scorer process died {_ATTEMPTS} times")


def read_score(text: str) -> Score:
    """Parse a scoring process's reply; anything that is no score becomes an ``infra_error``."""
    try:
        result = json.loads(text)
        parts = {name: finite(part) for name, part in result["parts"].items()}
        turns = [finite(reward) for reward in result.get("turn_rewards", [])]
        if result["status"] not in get_args(Status) or not isinstance(result["message"], str):
            raise ValueError(result["status"])
        score = Score(result["status"], parts, result["message"], turn_rewards=turns)
        is_finite = math.isfinite(score.reward)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Score("infra_error", {}, "invalid reply of the scorer")
    return score if is_finite else Score("infra_error", {}, f"the scorer gave {score.reward}")


# the scoring process


@dataclass
class Worker:
    """Forked worker with one line at a time."""

    pid: int
    connection: socket.socket
    line: int | None = None
    """Number of the line in work; None: idle."""
    begun: float = 0.0
    unsent: bytes = b""
    received: bytes = b""
    was_stopped: bool = False

    def send(self) -> None:
        """Send as much of the line as the socket takes."""
        with suppress(BlockingIOError, BrokenPipeError):
            self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def end(self) -> None:
        """Kill the worker's process group."""
        for kill in (os.killpg, os.kill):  # it may not be the head of its group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


@dataclass
class Workers:
    """Owner of the workers. ``max_workers``: limit of their number."""

    answer: Answer
    timeout: float
    max_workers: int
    output: int
    """Descriptor for answers."""
    workers: list[Worker] = field(default_factory=list)
    waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _patrolled: float = 0.0

    def serve(self) -> None:
        """Answer lines until standard input ends."""
        gc.freeze()  # the memory by now is shared with the workers, and stays so
        received = b""
        while True:
            readable, writable, _ = select.select(
                [0, *(w.connection for w in self.workers)],
                [w.connection for w in self.workers if w.unsent],
                [],
                self._patience(),
            )
            for worker in [w for w in self.workers if w.connection in writable]:
                worker.send()
            for worker in [w for w in self.workers if w.connection in readable]:
                self._receive(worker)
            if 0 in readable:
                chunk = os.read(0, _LINE_BYTES)
                if not chunk:
                    return
                *lines, received = (received + chunk).split(b"\n")
                self.waiting += [(int(number), text) for number, _, text in (line.partition(b" ") for line in lines)]
            self._check_workers()
            self._dispatch()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.end()

    def _patience(self) -> float | None:
        """Timeout of ``select`` in seconds; None: no deadline is running."""
        if self.waiting:
            return _LOOK_SECONDS
        return self._between_patrols if any(w.line is not None for w in self.workers) else None

    @property
    def _between_patrols(self) -> float:
        return min(_PATROL_SECONDS, self.timeout / 2)

    def _dispatch(self) -> None:
        for _ in range(min(self._room(), len(self.waiting)) if self.waiting else 0):
            idle = next((w for w in self.workers if w.line is None), None)
            if idle is None and (len(self.workers) == self.max_workers or self._is_any_done()):
                return
            worker = idle or self._fork()
            worker.line, text = self.waiting.popleft()
            worker.begun, worker.unsent = time.monotonic(), text + b"\n"
            worker.send()

    def _is_any_done(self) -> bool:
        """Whether a worker has just answered, and would be idle in a moment."""
        return bool(select.select([w.connection for w in self.workers], [], [], 0)[0])

    def _room(self) -> int:
        """Lines that may be handed out now."""
        states = [process_state(worker.pid) for worker in self.workers if worker.line is not None]
        computing = states.count("R")
        return max(available_cores() - computing, 0) if computing else available_cores() + len(states)

    def _fork(self) -> Worker:
        parent_end, child_end = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:
                    self._run_worker(child_end, parent_end)
            finally:
                os._exit(1)
        child_end.close()
        parent_end.setblocking(False)
        worker = Worker(pid, parent_end)
        self.workers.append(worker)
        return worker

    def _run_worker(self, connection: socket.socket, parent_end: socket.socket) -> None:
        """In the fork: answers lines until the other end is closed."""
        for inherited in (parent_end, *(worker.connection for worker in self.workers)):
            inherited.close()
        os.close(self.output)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for line in connection.makefile("rb"):
            connection.sendall(json.dumps(self.answer(json.loads(line))).encode() + b"\n")

    def _receive(self, worker: Worker) -> None:
        try:
            chunk = worker.connection.recv(_LINE_BYTES)
        except (BlockingIOError, ConnectionResetError):
            chunk = b""
        worker.received += chunk
        if (
            chunk
            and worker.line is not None
            and len(worker.received) <= _LINE_BYTES
            and not worker.received.endswith(b"\n")
        ):
            return  # there is more to come
        if worker.line is not None and worker.received.count(b"\n") == 1 and worker.received.endswith(b"\n"):
            self._send_result(worker, worker.received)
            worker.received = b""
        else:
            self._fail(worker, "infra_error", "the scorer process died or sent an invalid reply")

    def _check_workers(self) -> None:
        now = time.monotonic()
        if now < self._patrolled + self._between_patrols:
            return
        self._patrolled = now
        for worker in [w for w in self.workers if w.line is not None]:
            is_stopped = process_state(worker.pid) == "T"
            if is_stopped and worker.was_stopped:  # which no answer can do
                self._fail(worker, "infra_error", "the scorer process was stopped by a signal")
            elif now > worker.begun + self.timeout and not is_stopped:
                self._fail(worker, "timeout", f"scoring took longer than {self.timeout} s")
            worker.was_stopped = is_stopped

    def _fail(self, worker: Worker, status: str, message: str) -> None:
        worker.end()
        self.workers.remove(worker)
        if worker.line is not None:
            self._send_result(worker, json.dumps(dict(status=status, parts={}, message=message)).encode() + b"\n")

    def _send_result(self, worker: Worker, result: bytes) -> None:
        unsent, worker.line = b"%d %s" % (worker.line, result), None
        while unsent:
            unsent = unsent[os.write(self.output, unsent) :]


def serve(load: Callable[[], Answer], timeout: float, max_workers: int) -> None:
    """Print ``"ready"``, or the error of ``load``; then answer until standard input ends.

    ``load`` gives the function from a request to its answer. ``max_workers``: limit of workers.
    """
    output = os.dup(1)
    os.set_inheritable(output, False)
    os.dup2(2, 1)  # whatever a scorer prints must not look like a score
    write_each_line()
    try:
        answer = load()
    except Exception as error:  # the controller checked the same; what can differ is this machine
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        os.write(output, json.dumps(why).encode() + b"\n")
        return
    workers = Workers(answer, timeout, max_workers, output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.write(output, b'"ready"\n')
    try:
        workers.serve()
    finally:
        workers.close()
