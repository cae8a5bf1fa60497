"""Child process with one line for each request and reply, restarted when it dies or hangs.

One numbered line in for each request, one out, in any order; the first line out is ``"ready"``. Lines, and no
pickles, because what comes back from a process that a hostile answer went through must not be able to run anything.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from titan_rl.mesh.processes.deadlines import within
from titan_rl.mesh.processes.processes import is_stopped

_PATROL_SECONDS = 0.4
_PATIENCE_SECONDS = 5.0
"""Beyond the deadline of a request, until a silent process counts as hung."""
_END_SECONDS = 1.0
_LINE_BYTES = 2 << 20


class ProcessDied(RuntimeError):
    """Death of the process before its reply."""


class LineProcess:
    """Owner of the child process: starts it, pairs replies with requests, and restarts it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
        start_seconds: float,
    ):
        """``environment``: all its variables. ``timeout``: seconds for a reply, kept by the child itself."""
        self.name, self.command, self.environment = name, tuple(command), dict(environment)
        self.timeout, self.start_seconds = timeout, start_seconds
        self.process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._pending: dict[int, asyncio.Future[str]] = {}
        self._count = 0
        self._last_output = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start the process. Errors: DeadlineError or RuntimeError if it does not come up, or this was closed."""
        async with self._starting:
            if self.process is None:
                await self._start()

    async def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.name} was closed")
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        try:
            ready = await within(self.start_seconds, f"starting {self.name}", _stdout(process).readline())
            if ready != b'"ready"\n':
                why = ready.decode(errors="replace").strip() or "it died"
                raise RuntimeError(f"{self.name} did not start: {why}")
            if self._is_closed:
                raise RuntimeError(f"{self.name} was closed")
        except BaseException:  # cancelled included: a process that is not ready must not be taken for one
            await _end(process)
            raise
        self.process, self._last_output = process, time.monotonic()
        for work in (self._listen(process), self._watch(process)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Deliver replies until the process dies; then fail pending requests and restart it."""
        with suppress(ValueError):  # a line without end: it is not what we started any more
            while line := await _stdout(process).readline():
                self._last_output = time.monotonic()
                number, _, reply = line.decode(errors="replace").partition(" ")
                future = self._pending.pop(int(number), None)
                if future is not None and not future.done():
                    future.set_result(reply)
        await _end(process)
        if self.process is process:
            self.process = None
            self._fail_pending(ProcessDied(f"{self.name} died"))
            with suppress(Exception):  # the next request tries again, and raises
                await self.start()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that is stopped, or silent beyond its deadline."""
        was_stopped = False
        while process.returncode is None:
            await asyncio.sleep(_PATROL_SECONDS)
            stopped = is_stopped(process.pid)
            is_silent = bool(self._pending) and time.monotonic() > self._last_output + self.timeout + _PATIENCE_SECONDS
            if is_silent or stopped and was_stopped:
                await _end(process)
            was_stopped = stopped

    def _fail_pending(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    async def stop(self) -> None:
        """End the process; the next request starts another."""
        process, self.process = self.process, None
        if process is not None:
            await _end(process)
        self._fail_pending(RuntimeError(f"{self.name} was closed"))

    async def close(self) -> None:
        """Stop for good: pending requests fail, and no process is started again."""
        self._is_closed = True
        await self.stop()

    async def ask(self, line: str) -> str:
        """Send a line and await its reply.

        Errors: ProcessDied; RuntimeError when closed, DeadlineError or RuntimeError if it does not start.
        """
        await self.start()
        self._count += 1
        number, future = self._count, asyncio.get_running_loop().create_future()
        if not self._pending:
            self._last_output = time.monotonic()
        self._pending[number] = future
        try:
            assert self.process is not None, "it has just been started, and nothing was awaited since"
            self._write(self.process, f"{number} {line}")
            return await future
        finally:
            if self._pending.pop(number, None) is not None and self.process is not None:
                self._cancel(self.process, number)

    def _write(self, process: asyncio.subprocess.Process, line: str) -> None:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(f"{line}\n".encode())

    def _cancel(self, process: asyncio.subprocess.Process, number: int) -> None:
        """Hook: the request was cancelled by its caller."""


def _stdout(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None, "it is a pipe"
    return process.stdout


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all below it, which it ends itself where it still can. (``Process.send_signal`` would first look whether it
    has ended, and so take its exit code away from asyncio, which then knows of no such child.)"""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
