"""Trial of user code before a run: three rows' own answers are played and scored in another process.

That runs while this process imports its libraries, so that it costs a run no time; code that hangs or exits hurts
nobody. The other end is reward_trial_worker.py. What can never work ends the run; what is slow or asks a server does
not.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from titan_rl.config.errors import raise_findings
from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import JUDGE, TASKS_OF_OTHERS, Config
from titan_rl.mesh.processes.processes import ending, new_mark

_PATIENCE_SECONDS = 0.25
_END_SECONDS = 2.0


class RewardTrial:
    """Owner of the trial's process."""

    def __init__(self, config: Config):
        """The process begins at once."""
        settings = {
            "parent": os.getpid(),
            "task": asdict(config.task),
            "folders": list(config.run.plugin_path),
            "seed": config.run.seed,
            "score_timeout": config.verifier.score_timeout,
            "step_timeout": config.verifier.step_timeout,
        }
        self._mark = new_mark()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "titan_rl.environments.scoring.reward_trial_worker", json.dumps(settings)],
            env=os.environ | self._mark | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what user code prints is of no use yet
            start_new_session=True,
        )
        self._is_told = False

    def notices(self, seconds: float = _PATIENCE_SECONDS) -> list[str]:
        """Lines about the trial, once it is over; none before. ``seconds``: to wait for it.

        Errors: ConfigError if no row's own answer can be scored."""
        refusals, notices = self._report(seconds)
        raise_findings(refusals)
        return notices

    def late_notices(self) -> list[str]:
        """Lines about a trial that took longer than the run's start, which refuses nothing any more."""
        refusals, notices = self._report(0.0)
        return refusals + notices

    def _report(self, seconds: float) -> tuple[list[str], list[str]]:
        output = self._process.stdout
        assert output is not None, "it is a pipe"
        if self._is_told or not select.select([output], [], [], seconds)[0]:
            return [], []
        self._is_told = True
        line = output.readline()
        self._end_processes()
        report = json.loads(line) if line else {"refusals": [], "notices": []}  # the run's own checks tell why it died
        return report["refusals"], report["notices"]

    def end(self) -> None:
        """End the process, its scorer, and whatever user code has started."""
        self._end_processes()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _end_processes(self) -> None:
        for _ in ending(self._mark, _END_SECONDS):
            time.sleep(0.01)
        self._process.wait()


def is_tried(config: Config) -> bool:
    """Whether user code scores or plays, without a judge or somebody else's environment."""
    if config.data.file or config.reward_model.path:
        return False
    try:
        tasks = all_tasks(config.task).values()
    except ConfigError:  # which the run's own checks tell with whatever else is wrong
        return False
    names = [name for task in tasks for name in (task.name, *task.reward_names)]
    return any(map(is_reference, names)) and not {JUDGE, *TASKS_OF_OTHERS} & set(names)


@contextmanager
def reward_trial(config: Config) -> "Iterator[RewardTrial | None]":
    """Trial of a run's user code, which ends with the block; None where there is nothing to try."""
    if not is_tried(config):
        yield None
        return
    trial = RewardTrial(config)
    try:
        yield trial
    finally:
        trial.end()
