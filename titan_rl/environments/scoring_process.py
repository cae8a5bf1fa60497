"""Scoring in processes of its own, which a bad answer can hang or kill without hurting the run.

The other end is scoring_workers.py: one numbered JSON line in for each answer, one out. JSON, and not pickle, because
what comes back from a process that a hostile answer went through must not be able to run anything.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from titan_rl.environments.score import Score, read_score
from titan_rl.mesh.supervision.deadlines import together, within
from titan_rl.mesh.supervision.processes import MARK, is_stopped

_START_SECONDS = 60.0
_PATROL_SECONDS = 0.4
_PATIENCE_SECONDS = 5.0
"""Beyond the deadline of an answer, until a process that says nothing is held for hung."""
_END_SECONDS = 1.0
_ATTEMPTS = 3
_LINE_BYTES = 2 << 20
_HANDED_ON = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", MARK)
"""The environment of a scoring process, beside its number of threads."""


class ScoringProcess:
    """A process that scores many answers at once, started anew whenever it dies or hangs."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        timeout: float,
        start_seconds: float = _START_SECONDS,
        secrets: Sequence[str] = (),
    ):
        """``command``: what Python runs. ``timeout``: seconds for an answer, which the other end holds to.
        ``secrets``: variables of the environment that it is given besides."""
        self._handed_on = (*_HANDED_ON, *secrets)
        self.name, self.command, self.timeout, self.start_seconds = name, tuple(command), timeout, start_seconds
        self.process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._count = 0
        self._heard = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Errors: DeadlineError or RuntimeError if the process does not come up, or this was closed."""
        async with self._starting:
            if self.process is None:
                await self._start()

    async def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.name} was closed")
        environment = {key: os.environ[key] for key in self._handed_on if key in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        try:
            ready = await within(self.start_seconds, "starting a scorer", process.stdout.readline())
            if ready != b'"ready"\n':
                why = ready.decode(errors="replace").strip() or "it died"
                raise RuntimeError(f"{self.name} did not start: {why}")
            if self._is_closed:
                raise RuntimeError(f"{self.name} was closed")
        except BaseException:  # cancelled included: a process that is not ready must not be taken for one
            await _end(process)
            raise
        self.process, self._heard = process, time.monotonic()
        for work in (self._listen(process), self._patrol(process)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Until it dies; then whoever waits is told, and another is started at once."""
        with suppress(ValueError):  # a line without end: it is not what we started any more
            while line := await process.stdout.readline():
                self._heard = time.monotonic()
                number, _, said = line.decode(errors="replace").partition(" ")
                asked = self._asked.pop(int(number), None)
                if asked is not None and not asked.done():
                    asked.set_result(said)
        await _end(process)
        if self.process is process:
            self.process = None
            self._tell_all(ScorerGone("the scorer process died"))
            with suppress(Exception):  # whoever asks next tries again, and is told
                await self.start()

    async def _patrol(self, process: asyncio.subprocess.Process) -> None:
        """A process that is stopped, or says nothing for long, is as good as dead."""
        was_stopped = False
        while process.returncode is None:
            await asyncio.sleep(_PATROL_SECONDS)
            stopped = is_stopped(process.pid)
            is_silent = bool(self._asked) and time.monotonic() > self._heard + self.timeout + _PATIENCE_SECONDS
            if is_silent or stopped and was_stopped:
                await _end(process)
            was_stopped = stopped

    def _tell_all(self, error: Exception) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(error)

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await _end(process)
        self._tell_all(RuntimeError(f"{self.name} was closed"))

    async def close(self) -> None:
        """For good: whoever still waits for a score gets an error, and no process is started for them."""
        self._is_closed = True
        await self.stop()

    async def score_lines(self, lines: list[str]) -> tuple[list[Score], float]:
        """A score for each, side by side, and the seconds until the last of them. Errors: RuntimeError when closed."""
        start = time.perf_counter()
        scores = await together(self._score(line) for line in lines)
        return scores, time.perf_counter() - start

    async def _score(self, line: str) -> Score:
        for _ in range(_ATTEMPTS):
            await self.start()
            self._count += 1
            number, asked = self._count, asyncio.get_running_loop().create_future()
            if not self._asked:
                self._heard = time.monotonic()
            self._asked[number] = asked
            try:
                self.process.stdin.write(f"{number} {line}\n".encode())
                return read_score(await asked)
            except ScorerGone:  # with all that it had: no answer does that, so each is asked for again
                continue
            finally:
                self._asked.pop(number, None)
        return Score("infra_error", {}, f"the scorer process died {_ATTEMPTS} times")


class ScorerGone(RuntimeError):
    """The process died before it had answered."""


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all below it, which it ends itself where it still can."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
