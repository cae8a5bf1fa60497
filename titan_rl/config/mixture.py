"""Several tasks in one run: ``[task] name = "mixture"``, and a table for each, by a name of its own.

    [task]
    name = "mixture"

    [task.options.sums]
    name = "chain_sum"                  # the table's own name, if left out
    weight = 2                          # of three prompts two are sums

    [task.options.products]
    name = "calculator"
    options = { digits = 2 }

What a table leaves out of ``style`` and ``system_prompt`` is as ``[task]`` has it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Count
from titan_rl.config.sections.schema import JUDGE, MIXTURE, Config, TaskConfig

_LABEL = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass(kw_only=True)
class PartConfig(TaskConfig):
    """``[task.options.NAME]``: a task among others."""

    weight: Count = 1
    """Prompts that it has in each round."""


def parts_of(task: TaskConfig) -> dict[str, PartConfig]:
    """By their names. Errors: ConfigError."""
    if len(task.options) < 2:
        raise ConfigError("task.name = 'mixture' needs a table [task.options.NAME] for each of two tasks, or more")
    return {label: _part(task, label, table) for label, table in task.options.items()}


def _part(task: TaskConfig, label: str, table: object) -> PartConfig:
    setting = f"task.options.{label}"
    if not isinstance(table, dict):
        raise ConfigError(f"{setting} = {table!r}: a mixture's options are tables, one for each task")
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"{setting}: name it with letters, digits, - and _, since metrics are named by it")
    inherited = {"name": label, "style": task.style, "system_prompt": task.system_prompt}
    part = build_section(PartConfig, inherited | table, setting)
    if part.name == MIXTURE:
        raise ConfigError(f"{setting}.name = 'mixture': a mixture holds tasks, and no further mixtures")
    if part.system_prompt and part.style != "chat":
        raise ConfigError(f"{setting}.system_prompt needs {setting}.style = 'chat': set it, or leave the other out")
    if part.judge and JUDGE not in part.reward_names:
        raise ConfigError(f"{setting}.judge judges nothing: set {setting}.reward = 'judge', or leave it out")
    if part.keep_special:
        raise ConfigError(f"{setting}.keep_special: all answers of a run are read alike: set it as task.keep_special")
    if part.sandbox:
        raise ConfigError(f"{setting}.sandbox: all programs of a run go to one place: set it as task.sandbox")
    return part


def all_tasks(task: TaskConfig) -> dict[str, TaskConfig]:
    """Every task of a run, by the setting that holds it. Errors: ConfigError."""
    if task.name != MIXTURE:
        return {"task": task}
    return {"task": task} | {f"task.options.{label}": part for label, part in parts_of(task).items()}


def names_of(task: TaskConfig) -> list[str]:
    """Names of a mixture's tasks, in the TOML's order; empty for a single task."""
    return list(task.options) if task.name == MIXTURE else []


def first_name(task: TaskConfig) -> str:
    """Name of a mixture's first task, for rollouts that are made up; empty for a single task."""
    return next(iter(names_of(task)), "")


@dataclass(frozen=True)
class Teachers:
    """Teachers of a run, each directory once."""

    paths: tuple[str, ...]
    of_task: Mapping[str, int]
    """Place in ``paths`` of the teacher of each task of a mixture; empty for a single task."""

    @property
    def tasks(self) -> list[list[str]]:
        """Of each teacher, the names of its tasks."""
        return [[task for task, place in self.of_task.items() if place == number] for number in range(len(self.paths))]


def teachers_of(config: Config) -> Teachers:
    """Teachers by ``teacher.path`` and ``teacher.by_task``: of a mixture each task's own, or else the default.

    A directory that is named in two ways is one teacher. Source: the domain teachers of MOPD, arXiv 2606.30406."""
    teacher, names = config.teacher, names_of(config.task)
    path_of = {name: teacher.by_task.get(name, teacher.path) for name in names} or {"": teacher.path}
    path_on_disk: dict[str, str] = {}
    for path in filter(None, path_of.values()):
        path_on_disk.setdefault(os.path.realpath(path), path)
    order = list(path_on_disk)
    of_task = {name: order.index(os.path.realpath(path)) for name, path in path_of.items() if name and path}
    return Teachers(tuple(path_on_disk.values()), of_task)
