"""Scoring in processes of its own, which a bad answer can hang or kill without hurting the run.

The other end is scoring_workers.py: a JSON line in for each answer, one out (json_lines_process.py).
"""

import os
import sys
import time
from collections.abc import Sequence

from titan_rl.environments.conversation.json_lines_process import LineProcess, ProcessDied
from titan_rl.environments.interfaces.score import Score, read_score
from titan_rl.mesh.processes.deadlines import together
from titan_rl.mesh.processes.processes import MARK

_START_SECONDS = 60.0
_ATTEMPTS = 3
_HANDED_ON = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", MARK)
"""The environment of a scoring process, beside its number of threads."""


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
