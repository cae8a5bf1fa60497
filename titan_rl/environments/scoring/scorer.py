"""Scorer of a task's answers, in a process of its own: ``python -m titan_rl.environments.scoring.scorer``.

A grader is a second one of each sampled answer, for monitoring only: it can neither hurt a reward nor be talked to by
one. A failed grade is missing, with its reason; the sample stays as it is.
"""

import asyncio
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import resolve
from titan_rl.config.sections.schema import ANSWER_REWARDS, JUDGE, OWN_SCORE, TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, UserCodeError
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.functions import in_turns
from titan_rl.environments.rewards.llm_judge import key_variables
from titan_rl.environments.rewards.signatures import check_reward
from titan_rl.environments.rollout.suites import is_of_suite, make_all, tasks_of
from titan_rl.environments.scoring.scoring_process import Answer, ScoringProcess, serve
from titan_rl.mesh.resources.imports import collector_paused

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
        fields = asdict(replace(prompt, images=[]))  # a score is of what was said
        return await self.score_lines([json.dumps({"prompt": fields, "answers": answers}) for answers in rollouts])


class GradedScorer:
    """Scorer with an optional grader beside it."""

    def __init__(
        self,
        task: TaskConfig,
        grader: str,
        folders: Sequence[str],
        timeout: float,
        concurrency: int,
        suites: Sequence[Mapping[str, Any]] = (),
    ):
        """``grader``: empty for none; it grades no suite. ``timeout``: seconds for one answer, of either;
        ``concurrency``: side by side; ``suites``: as ``eval.suites``."""
        self.scorer = Scorer(task, folders, timeout, concurrency, suites)
        self.grader = Scorer(graded_task(task, grader), folders, timeout, concurrency) if grader else None

    async def start(self) -> int:
        """Start both; give the scorer's process id."""
        await asyncio.gather(self.scorer.start(), *([self.grader.start()] if self.grader else []))
        assert self.scorer.process is not None, "it has just been started"
        return self.scorer.process.pid

    async def close(self) -> None:
        for scorer in (self.scorer, self.grader):
            if scorer is not None:
                await scorer.close()

    async def score(self, prompt: Prompt, rollouts: list[list[str]]) -> tuple[list[Score], float]:
        """Score with grades, otherwise as ``Scorer.score``; the seconds are the scorer's."""
        if self.grader is None or is_of_suite(prompt):
            return await self.scorer.score(prompt, rollouts)
        (scores, seconds), (grades, _) = await asyncio.gather(
            self.scorer.score(prompt, rollouts), self.grader.score(prompt, rollouts)
        )
        return [_graded(score, grade) for score, grade in zip(scores, grades, strict=True)], seconds


def _graded(score: Score, grade: Score) -> Score:
    if grade.status == "ok":
        return replace(score, grade=grade.reward)
    return replace(score, message=score.message or f"not graded by eval.grader: {grade.message}")


def graded_task(task: TaskConfig, grader: str) -> TaskConfig:
    """Configuration of the same task, scored by ``eval.grader``."""
    unrewarded = replace(task, reward="", rewards={}, rewards_by_source={})
    return unrewarded if grader == OWN_SCORE else replace(unrewarded, reward=grader, scoring="auto")


def check_grader(task: TaskConfig, grader: str, folders: Sequence[str]) -> None:
    """Check ``eval.grader``.

    Errors: ConfigError for a grader that is the reward itself, is not there, or cannot grade this task.
    """
    setting = f"eval.grader = {grader!r}"
    if grader in task.reward_names:
        raise ConfigError(
            f"{setting} is the reward itself: name a function that nothing is trained on, or leave it out"
        )
    if grader not in (OWN_SCORE, JUDGE, *ANSWER_REWARDS):
        check_reward(setting, resolve("eval.grader", grader, folders))
    try:
        make_task(graded_task(task, grader), folders).prompt("check", 0, 0)
    except ConfigError as error:
        raise ConfigError(f"{setting} cannot grade this task: {error}") from None


def _load(task: TaskConfig, folders: Sequence[str], suites: Sequence[Mapping[str, Any]]) -> Answer:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with collector_paused():
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
