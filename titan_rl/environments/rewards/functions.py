"""Reward function of the user: ``(prompt, completion, row) -> float | dict`` or verl's form, sync or async.

It is called in the scorer process only, which has a deadline for each answer, a memory limit, and no environment
variables of the run but the paths. ``prompt`` is the text that was asked, or the messages that were; ``completion`` is
what the model wrote in its last turn; ``row`` holds the row's columns, or a reasoning-gym entry's ``question``,
``answer`` and ``metadata``. A dict names the parts of the reward, which add up.

A function that raises, or that gives anything but finite numbers, has failed: that is never a reward.
"""

import asyncio
import inspect
import linecache
import math
import os
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.plugins import is_reference, meant_reference, resolve, shown, source_file, what_happened
from titan_rl.config.sections.schema import JUDGE, OWN_SCORE, TaskConfig
from titan_rl.data.numbers import as_float
from titan_rl.data.rows.public_shapes import source_of
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task, TaskWrapper, UserCodeError
from titan_rl.environments.rewards.answer_graders import GRADERS
from titan_rl.environments.rewards.llm_judge import Judge, judge_config
from titan_rl.environments.rewards.mathematics.equality import library
from titan_rl.environments.rewards.mathematics.final_answer import is_right
from titan_rl.environments.rewards.signatures import caller, check_reward

Reward = Callable[[Any, str, dict[str, Any]], Any]


def with_rewards(task: Task, config: TaskConfig, folders: Sequence[str]) -> Task:
    """Task scored by ``task.reward`` or ``task.rewards``. Errors: ConfigError."""
    if config.reward and config.rewards:
        raise ConfigError("task.reward and task.rewards exclude each other: keep one of them")
    if config.rewards_by_source:
        return _by_source(task, config, folders)
    if config.reward not in ("", OWN_SCORE):
        return _rewarded(task, config, "task.reward", config.reward, folders)
    if not config.rewards:
        return task
    if not any(config.rewards.values()):
        raise ConfigError("task.rewards: each weight is 0, and so would be every reward: give one of them another")
    scored = {
        name: task if name == OWN_SCORE else _rewarded(task, config, "task.rewards", name, folders)
        for name in config.rewards
    }
    return WeightedTask(task, {name: (scored[name], weight) for name, weight in config.rewards.items()})


def _by_source(task: Task, config: TaskConfig, folders: Sequence[str]) -> Task:
    setting = "task.rewards_by_source"
    if config.reward or config.rewards:
        raise ConfigError(f"task.reward or task.rewards, and {setting}, exclude each other: keep one of them")
    if config.name != "jsonl":
        raise ConfigError(f"{setting} is of rows of a file, and task.name = {config.name!r} is none: take 'jsonl'")
    scored = {
        source: task if name == OWN_SCORE else _rewarded(task, config, f"{setting}.{source}", name, folders)
        for source, name in config.rewards_by_source.items()
    }
    return SourcedTask(task, scored)


def _rewarded(task: Task, config: TaskConfig, setting: str, name: str, folders: Sequence[str]) -> Task:
    if name == JUDGE:
        return RewardedTask(task, Judge(judge_config(config.judge)), name)
    if name in GRADERS:
        return GradedTask(task, GRADERS[name])
    if not is_reference(name):
        known = meant_reference(name) or nearest(
            name, (OWN_SCORE, JUDGE, *GRADERS), "a function of yours, 'module:name'"
        )
        raise ConfigError(f"{setting} = {name!r} is no reward: {known}")
    function = resolve(setting, name, folders)
    check_reward(f"{setting} = {name!r}", function)
    return RewardedTask(task, function, name)


class RewardedTask(TaskWrapper):
    """Task scored by a reward function."""

    def __init__(self, task: Task, function: Reward, name: str):
        super().__init__(task)
        self.function, self.name, self._call = function, name, caller(function)
        self._loop = asyncio.Runner()
        """Kept open, since an async function may keep a connection from one call to the next."""

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score the last answer. Errors: UserCodeError if the function raises or gives anything but finite numbers."""
        row = self.task.row(prompt)
        try:
            value = self._call(prompt, answers[-1], row)
            if inspect.isawaitable(value):
                value = self._loop.run(_result(value))
        except (Exception, SystemExit) as error:  # user code: whatever it raises is reported by name
            mend = "; a reward sees no environment variables: read a file" if _is_of_environment(error) else ""
            if _is_of_row(error, row):
                mend = f"; the row has the columns {', '.join(sorted(map(repr, row)))}"
            raise UserCodeError(f"{self.name}: {what_happened(error, source_file(self.function))}{mend}") from None
        return as_parts(self.name, value)


def _is_of_row(error: BaseException, row: Mapping[str, Any]) -> bool:
    """Whether a row was asked, in the line that raised, for a column that it has not."""
    column = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(column, str) or column in row:
        return False
    frame, number = list(traceback.walk_tb(error.__traceback__))[-1]
    line, key = linecache.getline(frame.f_code.co_filename, number), re.escape(column)
    names = [re.escape(name) for name, value in frame.f_locals.items() if value is row]
    return any(re.search(rf"\b{name}\[\s*['\"]{key}['\"]", line) for name in names)


def _is_of_environment(error: BaseException) -> bool:
    """Whether ``os.environ`` raised it, for a variable that is not set."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, KeyError) and frames[-1].f_code is type(os.environ).__getitem__.__code__


class GradedTask(TaskWrapper):
    """Task scored by the expected answer: 1 if the last answer is right, else 0."""

    def __init__(self, task: Task, grader: Callable[[str, str], bool]):
        super().__init__(task)
        self.grader = grader

    def prepare_scoring(self) -> None:
        super().prepare_scoring()
        if self.grader is is_right:
            library()

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score the last answer. Errors: ValueError for an unreadable expected answer."""
        return {"right": float(self.grader(answers[-1], prompt.answer))}


class SourcedTask(TaskWrapper):
    """Task whose rows are each scored by the set that they are of."""

    def __init__(self, task: Task, scored_by: Mapping[str, Task]):
        """``scored_by``: the same task scored in another way, by the name of a set."""
        super().__init__(task)
        self.scored_by = scored_by

    def prepare_scoring(self) -> None:
        for task in {id(task): task for task in self.scored_by.values()}.values():
            task.prepare_scoring()

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score of the row's own set. Errors: as each."""
        source = source_of(self.task.row(prompt))
        assert source is not None and source in self.scored_by, (
            "rows of other sets were refused when they were read (jsonl_task.py)"
        )
        return self.scored_by[source].score(prompt, answers)


def part_label(name: str, part: str) -> str:
    """Name of a part of one of several rewards."""
    return name if part == "reward" else f"{name}.{part}"


class WeightedTask(TaskWrapper):
    """Task with a weighted sum of rewards; parts are recorded with their weights."""

    def __init__(self, task: Task, scored_by: Mapping[str, tuple[Task, float]]):
        """``scored_by``: the same task scored in another way, and its weight, by its name."""
        super().__init__(task)
        self.scored_by = scored_by

    def prepare_scoring(self) -> None:
        for task, _ in self.scored_by.values():
            task.prepare_scoring()

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Weighted parts of all rewards. Errors: as each."""
        parts: dict[str, float | list[float]] = {}
        for name, (task, weight) in self.scored_by.items():
            for part, value in task.score(prompt, answers).items():
                weighted = [weight * item for item in value] if isinstance(value, list) else weight * value
                parts[part_label(name, part)] = weighted
        return parts


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def as_parts(name: str, value: Any) -> dict[str, float | list[float]]:
    """Named parts of a reward function's value; ``name``: the function's, for errors. Errors: UserCodeError."""
    if not isinstance(value, dict):
        return {"reward": _number(name, value)}
    if not value or not all(isinstance(key, str) for key in value):
        raise UserCodeError(f"{name} gave {shown(value)}: name each part of the reward, as in {{'correct': 1.0}}")
    return {key: _numbers(name, part, f" as {key!r}") for key, part in value.items()}


def _numbers(name: str, part: Any, where: str) -> float | list[float]:
    """A list has one for each answer of the rollout."""
    if isinstance(part, list) and not part:
        raise UserCodeError(f"{name} gave []{where}: give a number, or a list with one for each answer")
    return [_number(name, item, where) for item in part] if isinstance(part, list) else _number(name, part, where)


def in_turns(parts: RewardParts) -> tuple[dict[str, float], list[float]]:
    """Parts with lists summed up, and the reward of each answer by all lists.

    Errors: ValueError for lists of different lengths, and for an empty one, which would count as 0."""
    lists = [part for part in parts.values() if isinstance(part, list)]
    if empty := [name for name, part in parts.items() if part == []]:
        raise ValueError(f"the part {empty[0]!r} is []: give a number, or a list with one for each answer")
    turn_rewards = [float(sum(rewards)) for rewards in zip(*lists, strict=True)]
    return {name: as_float(sum(part) if isinstance(part, list) else part) for name, part in parts.items()}, turn_rewards


def _number(name: str, value: Any, where: str = "") -> float:
    if not isinstance(value, Real | np.bool_):
        raise UserCodeError(f"{name} gave {shown(value)}{where}: give a number, or a dict of numbers")
    if not math.isfinite(number := as_float(value)):
        raise UserCodeError(f"{name} gave {number}{where}: give a finite number")
    return number
