"""Scorer of a task's answers, in a process of its own: ``python -m titan_rl.environments.scoring.scorer``."""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, UserCodeError
from titan_rl.environments.rewards.functions import in_turns
from titan_rl.environments.rewards.llm_judge import key_variables
from titan_rl.environments.rollout.suites import make_all, tasks_of
from titan_rl.environments.scoring.scoring_process import ScoringProcess
from titan_rl.environments.scoring.scoring_workers import Answer, serve

_MEMORY_BYTES = 4 << 30
_MESSAGE_CHARACTERS = 500


class Scorer(ScoringProcess):
    """Scoring process of a task and of suites beside it.

    ``timeout``: seconds for one answer; ``concurrency``: most answers side by side; ``suites``: as ``eval.suites``.
    """

    def __init__(
        self,
        task: TaskConfig,
        folders: Sequence[str],
        timeout: float,
        concurrency: int,
        suites: Sequence[Mapping[str, Any]] = (),
    ):
        described = (asdict(task), list(folders), list(suites))
        arguments = *map(json.dumps, described), str(timeout), str(concurrency)
        command = "-m", "titan_rl.environments.scoring.scorer", *arguments
        secrets = [*key_variables(tasks_of(task, suites).values()), *filter(None, [task.sandbox.get("token_env")])]
        super().__init__(f"the scorer of task {task.name}", command, timeout, secrets=secrets)

    async def score(self, prompt: Prompt, rollouts: list[list[str]]) -> tuple[list[Score], float]:
        """Score each rollout's answers; gives the scores, and the seconds for all."""
        fields = asdict(prompt)
        return await self.score_lines([json.dumps({"prompt": fields, "answers": answers}) for answers in rollouts])


def _load(task: TaskConfig, folders: Sequence[str], suites: Sequence[Mapping[str, Any]]) -> Answer:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    loaded = make_all(task, suites, folders)
    loaded.prepare_scoring()
    return partial(_result, loaded)


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
    _task, _folders, _suites, _timeout, _at_once = sys.argv[1:]
    serve(
        partial(_load, TaskConfig(**json.loads(_task)), json.loads(_folders), json.loads(_suites)),
        float(_timeout),
        int(_at_once),
    )
