"""Scoring in a process of its own, which a bad answer can hang or kill without hurting the run.

The other end is ``python -m titan_rl.tasks.scorer``: one JSON line in for each rollout, one out. JSON, and not
pickle, because what comes back from a process that a hostile answer went through must not be able to run anything.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from titan_rl.mesh.processes import MARK
from titan_rl.tasks.base import make_task
from titan_rl.types import Prompt, Status

_MEMORY_BYTES = 4 << 30
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Score:
    """Parts of a reward, or why there is none."""

    status: Status
    parts: dict[str, float]
    message: str = ""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


class Scorer:
    """One scorer process, started anew whenever an answer hangs or kills it. One user at a time, by ``lock``."""

    def __init__(self, task: dict[str, Any], timeout: float):
        self.task, self.timeout = task, timeout
        self.lock = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Errors: TimeoutError or RuntimeError if the process does not come up."""
        environment = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME", MARK) if key in os.environ}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "titan_rl.tasks.scorer", json.dumps(self.task), str(self.timeout)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        ready = await asyncio.wait_for(self.process.stdout.readline(), _START_SECONDS)
        if ready != b'"ready"\n':
            raise RuntimeError(f"the scorer of task {self.task['name']} did not start")

    async def stop(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            self.process = None

    async def score(self, prompt: Prompt, rollouts: list[list[str]]) -> tuple[list[Score], float]:
        """A score for each rollout's answers, each within the deadline, and the seconds that they took together."""
        async with self.lock:
            start, scores = time.perf_counter(), []
            while len(scores) < len(rollouts):
                async for score in self._score_until_failure(prompt, rollouts[len(scores) :]):
                    scores.append(score)
            return scores, time.perf_counter() - start

    async def _score_until_failure(self, prompt: Prompt, rollouts: list[list[str]]) -> AsyncIterator[Score]:
        """All are asked at once; the first that fails takes the process with it, and the rest is asked again."""
        if self.process is None:
            await self.start()
        lines = [json.dumps({"prompt": asdict(prompt), "answers": answers}) for answers in rollouts]
        self.process.stdin.write(("\n".join(lines) + "\n").encode())
        for _ in rollouts:
            try:
                line = await asyncio.wait_for(self.process.stdout.readline(), self.timeout)
            except TimeoutError:
                await self.stop()
                yield Score("timeout", {}, f"scoring took longer than {self.timeout} s")
                return
            try:
                result = json.loads(line)
                score = Score(result["status"], {k: float(v) for k, v in result["parts"].items()}, result["message"])
            except (ValueError, KeyError, TypeError, AttributeError):
                await self.stop()
                yield Score("infra_error", {}, "the scorer process died or answered nonsense")
                return
            yield score


def _serve(task_arguments: dict[str, Any], timeout: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a scorer prints must not look like a score
    task = make_task(**task_arguments)
    print('"ready"', file=output)
    for line in sys.stdin:
        request = json.loads(line)
        # the parent kills sooner; this is for a parent that is dead itself
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        try:
            parts = task.score(Prompt(**request["prompt"]), request["answers"])
            result = dict(status="ok", parts=parts, message="")
        except Exception as error:  # whatever a scorer trips over is reported by name, never a reward
            result = dict(status="infra_error", parts={}, message=f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=output)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), float(sys.argv[2]))
