"""Names of the parts of a task's reward, as far as they are known before any answer is scored.

A reward function of the user's may name what it likes, and is not called here.
"""

from collections.abc import Collection, Iterable

from titan_rl.config.load import ConfigError
from titan_rl.environments.interfaces.task import Task, TaskWrapper, parts_of
from titan_rl.environments.rewards.functions import (
    GradedTask,
    RewardedTask,
    SourcedTask,
    WeightedTask,
    part_label,
)
from titan_rl.environments.rewards.llm_judge import Judge
from titan_rl.environments.tasks.user_task import UserTask

Names = dict[str, bool]
"""By name, whether each reward has the part. A name that ends with ``*`` stands for all that begin so."""
_UNKNOWN: Names = {"reward": False, "*": False}


def part_names(task: Task) -> Names:
    """Names of the parts of a task's reward, or of all tasks of a mixture. Errors: ConfigError, as of prompts."""
    may_reward = any(_own_names(_unwrapped(each)) in ({}, _UNKNOWN) for each in parts_of(task))
    return _names(task) | ({"environment": False} if may_reward else {})


def check_weights_of_parts(weights: Collection[str], names: Names) -> None:
    """Errors: ConfigError for weights of what is no part of the reward, and for parts without one."""
    setting, known = "algorithm.reward_weights", ", ".join(name for name in names if name != "*")
    for name in weights:
        if not _is_part(name, names):
            raise ConfigError(f"{setting}.{name} is of no part of the reward ({known}): rename it, or leave it out")
    if missing := [name for name, is_always in names.items() if is_always and name not in weights]:
        raise ConfigError(
            f"{setting} has no {missing[0]!r}, a part of the reward ({known}): add it, with 0 to leave the part out"
        )


def _is_part(name: str, names: Names) -> bool:
    """Whether there may be a part of the name."""
    return name in names or any(name.startswith(known[:-1]) for known in names if known.endswith("*"))


def _names(task: Task) -> Names:
    if isinstance(task, WeightedTask):
        return {
            part_label(name, part): is_always
            for name, (scored, _) in task.scored_by.items()
            for part, is_always in _names(scored).items()
        }
    if isinstance(task, SourcedTask):
        return _merged(map(_names, task.scored_by.values()))
    if isinstance(task, RewardedTask):
        return {"reward": True} if isinstance(task.function, Judge) else _UNKNOWN
    return {"right": True} if isinstance(task, GradedTask) else _own_names(task)


def _own_names(task: Task) -> Names:
    """Names of a task's own score, the same for all answers of a task of ours; none where its environment rewards."""
    if task.parts:
        return _merged(map(_names, task.parts.values()))
    if isinstance(task, UserTask):
        return _UNKNOWN
    return dict.fromkeys(task.score(task.prompt("check", 0, 0), [""]), True)


def _merged(names: Iterable[Names]) -> Names:
    merged: Names = {}
    for each in names:
        merged |= {name: is_always or merged.get(name, False) for name, is_always in each.items()}
    return merged


def _unwrapped(task: Task) -> Task:
    return _unwrapped(task.task) if isinstance(task, TaskWrapper) else task
