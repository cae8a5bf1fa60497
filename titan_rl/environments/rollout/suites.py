"""Suites of ``[[eval.suites]]`` as tasks beside the run's own, each with its prompts.

Their prompts have the name ``eval/NAME`` as their task, by which verifiers and scorers tell them from the run's own.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.kinds import LEAST_TEMPERATURE
from titan_rl.config.sections.schema import MIXTURE, OWN_SCORE, TASKS_OF_FILES, Config, TaskConfig
from titan_rl.config.sections.suites import PRESETS, SuiteConfig
from titan_rl.data.rows.file_sources import Source, check_unweighted, locate_sources
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task, TaskWrapper
from titan_rl.environments.prompts.jsonl_task import ListedTask, RowsTask
from titan_rl.environments.prompts.stream import held_out_prompts
from titan_rl.environments.registry import make_part, make_task
from titan_rl.environments.rewards.answer_graders import READERS
from titan_rl.environments.rollout.decoding import CUTS, changed
from titan_rl.environments.tasks.math_task import MathTask
from titan_rl.environments.tasks.suites.base import SuiteTask

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_PREFIX = "eval/"
_OF_TRAINING = ("held_out_file", "held_out_share")
"""Options of a file's rows that divide them for training."""


@dataclass(frozen=True)
class Suite:
    """Suite with its task, which is made and has read nothing yet."""

    config: SuiteConfig
    task_config: TaskConfig
    task: Task
    prompts: tuple[Prompt, ...] = ()
    left_out: int = 0
    """Rows of the set that are not asked, since they cannot be scored."""

    @property
    def setting(self) -> str:
        return setting_of(self.config)

    def max_new_tokens(self, default: int) -> int:
        """Longest answer. ``default``: of a task that is no public set."""
        preset = None if self.config.task else PRESETS[self.config.suite or self.config.name]
        return self.config.max_new_tokens or (preset.max_new_tokens if preset else default)

    @property
    def has_votes(self) -> bool:
        """Whether its answers have a final answer, to count for a majority."""
        return self.task.VOTES if isinstance(self.task, SuiteTask) else self._reader is not None

    @property
    def _reader(self) -> Callable[[str], str | None] | None:
        """Reader of final answers, as they are scored; None where something else is scored."""
        task, names = _unwrapped(self.task), set(self.task_config.reward_names)
        if len(names) > 1 or not self.task.has_one_answer or self.task.has_agent:
            return None
        [name] = names
        if name != OWN_SCORE:
            return READERS.get(name)
        if isinstance(task, MathTask):
            return READERS["math"]
        return str.strip if type(task) is RowsTask else None  # its own score is an exact match, a subclass's is not

    def final(self, prompt: Prompt, answer: str) -> str | None:
        """Final answer that a majority counts; None if there is none."""
        if isinstance(self.task, SuiteTask):
            return self.task.final(prompt, answer) if self.task.VOTES else None
        reader = self._reader
        return (reader(answer) or None) if reader else None

    def readings(self, prompt: Prompt, answer: str) -> dict[str, bool]:
        """Whether an answer is right by other rules, by their names."""
        return self.task.readings(prompt, answer) if isinstance(self.task, SuiteTask) else {}

    def with_prompts(self, count: int) -> "Suite":
        """With its questions. ``count``: of an endless task that names no number. Errors: ConfigError."""
        with errors_under(self.setting):
            prompts = self._prompts(count)
        left_out = self.task.left_out if isinstance(self.task, SuiteTask) else 0
        name = f"{_PREFIX}{self.config.name}"
        return replace(
            self,
            prompts=tuple(replace(each, id=f"{name}/{n:07d}", task=name) for n, each in enumerate(prompts)),
            left_out=left_out,
        )

    def _prompts(self, count: int) -> list[Prompt]:
        asked, task = self.config.prompts, _unwrapped(self.task)
        if not isinstance(task, ListedTask):
            return held_out_prompts(self.task, asked or count)
        prompts = task.every_prompt()
        if asked > len(prompts):
            raise ConfigError(f"{self.setting}.prompts = {asked}, but it has {len(prompts)} rows: ask for fewer")
        return prompts[: asked or None]


def _unwrapped(task: Task) -> Task:
    """Task without the rewards around it."""
    while isinstance(task, TaskWrapper):
        task = task.task
    return task


def setting_of(config: SuiteConfig) -> str:
    """Setting that holds a suite, for messages."""
    return f"eval.suites.{config.name}"


def is_of_suite(prompt: Prompt) -> bool:
    """Whether a prompt is a suite's."""
    return prompt.task.startswith(_PREFIX)


def suite_configs(tables: Sequence[Mapping[str, Any]]) -> list[SuiteConfig]:
    """Parse ``[[eval.suites]]``. Errors: ConfigError."""
    suites = [_suite_config(number, table) for number, table in enumerate(tables)]
    names = [suite.name for suite in suites]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ConfigError(
            f"two of eval.suites have the name {twice!r}, by which results are named: give one another name, and "
            f"suite = {twice!r}"
        )
    return suites


def _suite_config(number: int, table: Mapping[str, Any]) -> SuiteConfig:
    if not isinstance(table.get("name"), str) or not _NAME.fullmatch(table["name"]):
        raise ConfigError(
            f"eval.suites.{number} needs a name of letters, digits, '-', '_' and '.', such as name = 'gsm8k'"
        )
    config = build_section(SuiteConfig, dict(table), f"eval.suites.{table['name']}")
    setting, preset = setting_of(config), config.suite or config.name
    if config.samples and config.samples < config.k:
        raise ConfigError(
            f"{setting}.samples = {config.samples} is less than k = {config.k}: raise it, or leave it out"
        )
    cuts = changed(config, CUTS)
    if cuts and not config.sampling_temperature:
        raise ConfigError(
            f"{setting}.{cuts[0]} = {getattr(config, cuts[0])} has no effect on greedy answers: set temperature, or "
            f"leave it out"
        )
    _check_temperature(config)
    if config.task and (config.file or config.suite or config.options):
        raise ConfigError(
            f"{setting}.task is a whole task: put file and options into task.options, and leave suite out"
        )
    if not config.task and preset not in PRESETS:
        raise ConfigError(
            f"{setting} has no task = {{...}}, and the set {preset!r} is unknown: {nearest(preset, PRESETS)}"
        )
    return config


def _check_temperature(config: SuiteConfig) -> None:
    """Errors: ConfigError for greedy answers that are all alike, and for what vLLM raises without a word."""
    setting, temperature = setting_of(config), config.sampling_temperature
    if not temperature and config.num_samples > 1:
        raise ConfigError(
            f"{setting}.temperature = 0 gives {config.num_samples} times the same answer: set it above 0, or leave k "
            f"and samples out"
        )
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"{setting}.temperature = {temperature} would be sampled at {LEAST_TEMPERATURE}, the least that vLLM has: "
            f"give 0 for greedy answers, or {LEAST_TEMPERATURE} or more"
        )


def suite_task(config: SuiteConfig, run: TaskConfig) -> TaskConfig:
    """Task of a suite. ``run``: the run's, for what a suite leaves out. Errors: ConfigError."""
    setting = setting_of(config)
    style, system_prompt = config.style or run.style, config.system_prompt
    if config.task:
        inherited = {"style": style, "system_prompt": system_prompt}
        task = build_section(TaskConfig, inherited | config.task, f"{setting}.task")
        if task.name == MIXTURE or "name" not in config.task:
            raise ConfigError(f"{setting}.task.name: name one task; several are several suites")
    else:
        name = config.suite or config.name
        options = {"file": config.file or PRESETS[name].hub, **config.options}
        task = TaskConfig(name=name, options=options, style=style, system_prompt=system_prompt)
    if task.sandbox or task.keep_special:
        raise ConfigError(f"{setting}.task: sandbox and keep_special are the run's: set them in [task]")
    if task.system_prompt and task.style != "chat":
        raise ConfigError(f"{setting}.system_prompt needs style = 'chat': set it, or leave the other out")
    if task.name in TASKS_OF_FILES and (key := next((key for key in _OF_TRAINING if key in task.options), None)):
        raise ConfigError(f"{setting}: {key} is of training; a suite asks all rows of file: give those alone as file")
    check_unweighted(f"{setting}.file", task.options.get("file"))
    return replace(task, keep_special=run.keep_special)


def tasks_of(run: TaskConfig, suites: Sequence[Mapping[str, Any]]) -> dict[str, TaskConfig]:
    """Tasks that are scored, by their settings: of a run, and of its suites beside. Errors: ConfigError."""
    beside = {f"{setting_of(suite)}.task": suite_task(suite, run) for suite in suite_configs(suites)}
    return all_tasks(run) | beside


def make_suites(config: Config) -> list[Suite]:
    """All suites of a run. Errors: ConfigError."""
    return [
        _make(suite, suite_task(suite, config.task), config.run.plugin_path)
        for suite in suite_configs(config.eval.suites)
    ]


def _make(suite: SuiteConfig, task_config: TaskConfig, folders: Sequence[str]) -> Suite:
    with errors_under(setting_of(suite)):
        task = make_part(task_config, folders)
    if task.seats:
        raise ConfigError(f"{setting_of(suite)}: its task has several players, which a suite has not: leave it out")
    return Suite(suite, task_config, task)


def suite_sources(config: Config) -> dict[str, list[Source]]:
    """Sources of all suites' rows, by the setting that names each. Errors: ConfigError."""
    tasks = {setting_of(suite): suite_task(suite, config.task) for suite in suite_configs(config.eval.suites)}
    files = {f"{place}.file": task.options.get("file") for place, task in tasks.items() if task.name in TASKS_OF_FILES}
    return {place: locate_sources(place, file, config.run.plugin_path) for place, file in files.items() if file}


def make_all(task: TaskConfig, suites: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> Task:
    """Task of a run with its suites beside. ``suites``: as ``eval.suites``. Errors: ConfigError."""
    own = make_task(task, folders)
    if not suites:
        return own
    beside = [_make(suite, suite_task(suite, task), folders) for suite in suite_configs(suites)]
    return TaskWithSuites(own, {f"{_PREFIX}{suite.config.name}": suite.task for suite in beside})


class TaskWithSuites(TaskWrapper):
    """Task of a run with those of its suites; a prompt's ``task`` tells whose it is."""

    def __init__(self, task: Task, suites: Mapping[str, Task]):
        super().__init__(task)
        self.suites = suites

    @property
    def parts(self) -> Mapping[str, Task]:
        return {**(self.task.parts or {"": self.task}), **self.suites}

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        return self.suites.get(prompt.task, self.task).score(prompt, answers)

    def prepare_scoring(self) -> None:
        for task in (self.task, *self.suites.values()):
            task.prepare_scoring()


@contextmanager
def errors_under(setting: str) -> Iterator[None]:
    """A suite's errors name its own settings in the place of a run's task."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("task.options.", f"{setting}.")
        raise ConfigError(text if setting in text else f"{setting}: {text}") from None
