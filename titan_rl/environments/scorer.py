"""Scoring in a process of its own, which a bad answer can hang or kill without hurting the run.

The other end is ``python -m titan_rl.environments.scorer``: one JSON line in for each rollout, one out. JSON, and not
pickle, because what comes back from a process that a hostile answer went through must not be able to run anything.
"""

import asyncio
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import TaskConfig
from titan_rl.data.types import Prompt, Status
from titan_rl.environments.base import make_task
from titan_rl.environments.rewards import in_turns
from titan_rl.environments.task import Task, UserCodeError
from titan_rl.mesh.supervision.deadlines import within
from titan_rl.mesh.supervision.processes import MARK, is_stopped

_MEMORY_BYTES = 4 << 30
_START_SECONDS = 60.0
_PATROL_SECONDS = 0.4
_LINE_BYTES = 1 << 20
_HANDED_ON = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", MARK)
"""The environment of a scorer process, beside its number of threads."""
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True)
class Score:
    """Parts of a reward, or why there is none."""

    status: Status
    parts: dict[str, float]
    message: str = ""
    grade: float | None = None
    """By ``eval.grader`` (grading.py), if there is one and it could."""
    turn_rewards: list[float] = field(default_factory=list)
    """Of each answer, if the task gives such; they are in ``parts`` by their sum."""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


class ScoringProcess:
    """A process that scores, started anew whenever it dies or an answer hangs it. One user at a time, by ``lock``."""

    def __init__(self, name: str, command: Sequence[str], timeout: float, start_seconds: float = _START_SECONDS):
        """``command``: what Python runs. It says "ready", then answers each line with one."""
        self.name, self.command, self.timeout, self.start_seconds = name, tuple(command), timeout, start_seconds
        self.lock = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Errors: DeadlineError or RuntimeError if the process does not come up, or this was closed."""
        if self._is_closed:
            raise RuntimeError(f"{self.name} was closed")
        environment = {key: os.environ[key] for key in _HANDED_ON if key in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        self.process = process
        try:
            ready = await within(self.start_seconds, "starting a scorer", _line_of(process))
            if ready != b'"ready"\n':
                why = ready.decode(errors="replace").strip() or "it died"
                raise RuntimeError(f"{self.name} did not start: {why}")
        except BaseException:  # cancelled included: a process that is not ready must not be taken for one
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._replace_when_gone(process))

    async def _replace_when_gone(self, process: asyncio.subprocess.Process) -> None:
        """A caller that uses the process when it dies starts another; if there is none, it is done here at once."""
        await process.wait()
        async with self.lock:
            await self._start_if_gone()

    async def _start_if_gone(self) -> None:
        if self.process is not None and self.process.returncode is not None:
            await self.stop()
            await self.start()

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def close(self) -> None:
        """For good: whoever still waits for a score gets an error, and no process is started for them."""
        self._is_closed = True
        await self.stop()

    async def score_lines(self, lines: list[str]) -> tuple[list[Score], float]:
        """A score for each, each within the deadline, and the seconds that they took together."""
        async with self.lock:
            start, scores = time.perf_counter(), []
            try:
                while len(scores) < len(lines):
                    async for score in self._score_until_failure(lines[len(scores) :]):
                        scores.append(score)
            except BaseException:  # answers still under way must not be taken for the next prompt's
                await self.stop()
                raise
            return scores, time.perf_counter() - start

    async def _score_until_failure(self, lines: list[str]) -> AsyncIterator[Score]:
        """All are asked at once; after the first that fails the process is killed, and the caller asks for the rest."""
        await self._start_if_gone()
        if self.process is None:
            await self.start()
        self.process.stdin.write(("\n".join(lines) + "\n").encode())
        for _ in lines:
            try:
                score = _read_score(await asyncio.wait_for(_line_of(self.process), self.timeout))
            except TimeoutError:
                score = Score("timeout", {}, f"scoring took longer than {self.timeout} s")
            except StoppedError as error:  # which no answer can do
                score = Score("infra_error", {}, str(error))
            except (ValueError, KeyError, TypeError, AttributeError):
                score = Score("infra_error", {}, "the scorer process died or answered nonsense")
            else:
                yield score
                continue
            await self.stop()
            yield score
            return


class Scorer(ScoringProcess):
    """Scores by the task."""

    def __init__(self, task: TaskConfig, folders: Sequence[str], timeout: float):
        arguments = json.dumps(asdict(task)), json.dumps(list(folders)), str(timeout)
        super().__init__(f"the scorer of task {task.name}", ("-m", "titan_rl.environments.scorer", *arguments), timeout)

    async def score(self, prompt: Prompt, rollouts: list[list[str]]) -> tuple[list[Score], float]:
        """A score for each rollout's answers, and the seconds that they took together."""
        return await self.score_lines(
            [json.dumps({"prompt": asdict(prompt), "answers": answers}) for answers in rollouts]
        )


class StoppedError(RuntimeError):
    """A signal stopped the scorer process."""


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    """The next that it prints; without one, nothing. Errors: StoppedError if it stays stopped."""
    reading = asyncio.ensure_future(process.stdout.readline())
    try:
        was_stopped = False
        while not (await asyncio.wait({reading}, timeout=_PATROL_SECONDS))[0]:
            if was_stopped and is_stopped(process.pid):
                raise StoppedError("the scorer process was stopped by a signal")
            was_stopped = is_stopped(process.pid)
        return reading.result()
    finally:
        reading.cancel()


def _read_score(line: bytes) -> Score:
    """Errors: ValueError, KeyError, TypeError or AttributeError for anything but a score."""
    result = json.loads(line)
    parts = {name: float(part) for name, part in result["parts"].items()}
    turns = [float(reward) for reward in result.get("turn_rewards", [])]
    score = Score(result["status"], parts, result["message"], turn_rewards=turns)
    if not math.isfinite(score.reward):
        return Score("infra_error", {}, f"the scorer gave {score.reward}")
    return score


def _serve(task_config: TaskConfig, folders: Sequence[str], timeout: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a scorer prints must not look like a score
    try:
        task = make_task(task_config, folders)
    except ConfigError as error:  # the controller checked the same; what can differ is this machine
        print(json.dumps(str(error)), file=output)
        return
    print('"ready"', file=output)
    for line in sys.stdin:
        # the parent kills sooner; this is for a parent that is dead itself
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        result = _result(task, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=output)


def _result(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    try:
        parts, turn_rewards = in_turns(task.score(Prompt(**request["prompt"]), request["answers"]))
        if turn_rewards and len(turn_rewards) != len(request["answers"]):
            raise ValueError(f"{len(turn_rewards)} rewards for {len(request['answers'])} answers: give one for each")
        return dict(status="ok", parts=parts, turn_rewards=turn_rewards, message="")
    except UserCodeError as error:
        message = str(error)
    except Exception as error:  # whatever a scorer trips over is reported by name, never a reward
        message = f"{type(error).__name__}: {error}"
    return dict(status="infra_error", parts={}, message=message[:_MESSAGE_CHARACTERS])


if __name__ == "__main__":
    _serve(TaskConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2]), float(sys.argv[3]))
