"""``titan-rl doctor CONFIG --rows N``: a row's own answer earns its reward, and an empty one does not.

It needs no model and starts no actor: answers are scripted, environment and scorer are the run's own. A task of
software engineering applies the row's patch, and leaves the repository as it is.
"""

import asyncio
import json
import os
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.progress import track
from rich.table import Table

from titan_rl.config.io.printable import printable, say
from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.mixture import all_tasks
from titan_rl.config.plugins import what_happened
from titan_rl.config.sections.schema import TASKS_OF_OTHERS, Config, TaskConfig
from titan_rl.controller.preflight.checks import tokenizer_of
from titan_rl.data.types import Prompt, correct
from titan_rl.environments.interfaces.task import Task, parts_of, task_of
from titan_rl.environments.prompts.jsonl_task import HELD_OUT
from titan_rl.environments.prompts.stream import EACH_ROW
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.answer_lengths import answer_notice
from titan_rl.environments.rollout.demonstrations import worked_answers
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.environments.scoring.scripted import ScriptedEpisodes

_MOST_TURNS = 64
_SHOWN = 50
"""Rows of the table; ``--json`` has all."""


@dataclass(frozen=True)
class RowFinding:
    """Rewards of a row's own answer and of an empty one; None: not scored."""

    place: str
    own: float | None
    empty: float | None
    failure: str = ""
    """Why one was not scored."""

    @property
    def problem(self) -> str:
        """What is wrong with the row; empty if nothing is."""
        if self.own is None or self.empty is None:
            return self.failure
        if not correct(self.own):
            return "its own answer is not right"
        return "an empty answer earns as much" if self.empty >= self.own else ""


def doctor_rows(config_file: str | None, overrides: dict[str, dict[str, Any]], count: int, *, as_json: bool) -> int:
    """The exit code: 1 if a row is wrong. ``count``: 0 for all rows. Errors: ConfigError."""
    if count < 0:
        raise ConfigError(f"--rows {count}: give a number of rows, or 0 for all")
    start, config = time.monotonic(), load_config(config_file, overrides)
    findings = asyncio.run(_findings(config, count, shows=not as_json))
    wrong = [finding for finding in findings if finding.problem]
    notices = _length_notices(config, are_paid=not wrong)
    seconds = time.monotonic() - start
    if as_json:
        rows = [{"row": each.place, "own": each.own, "empty": each.empty, "problem": each.problem} for each in findings]
        report = {"healthy": not wrong, "seconds": round(seconds, 1), "notices": notices, "rows": rows}
        print(json.dumps(report))
        return 1 if wrong else 0
    if wrong:
        Terminal().print(_table(wrong[:_SHOWN]))
    if len(wrong) > _SHOWN:
        say(f"{len(wrong) - _SHOWN} more are not shown: --json has all")
    for line in notices:
        say(line)
    say(f"{len(findings) - len(wrong)} of {len(findings)} rows are as they should be, in {seconds:.0f} s")
    return 1 if wrong else 0


def _length_notices(config: Config, *, are_paid: bool) -> list[str]:
    """Lines about expected answers that are too long; none where the model, which rows can do without, is not here.

    ``are_paid``: whether each row's own answer is right."""
    task = make_task(_without_agents(config.task), config.run.plugin_path)
    try:
        return answer_notice(config, task, partial(tokenizer_of, config), functions_pay=are_paid)
    except ConfigError:
        return []


def _table(wrong: list[RowFinding]) -> Table:
    table = Table("row", "its own answer", "an empty one", "what is wrong", box=None, pad_edge=False)
    for each in wrong:
        earned = ("-" if reward is None else f"{reward:.3g}" for reward in (each.own, each.empty))
        table.add_row(printable(each.place), *earned, printable(each.problem, 200))
    return table


async def _findings(config: Config, count: int, *, shows: bool) -> list[RowFinding]:
    """Errors: ConfigError."""
    described = _without_agents(config.task)
    task, verifier = make_task(described, config.run.plugin_path), config.verifier
    _check(config, task)
    task.check_ready()
    prompts = _prompts(task, config.run.seed, count)
    scorer = Scorer(described, config.run.plugin_path, verifier.score_timeout, verifier.scoring_workers)
    await scorer.start()
    try:
        episodes = ScriptedEpisodes(task, scorer, verifier.step_timeout, _MOST_TURNS)
        places = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        waiting = [asyncio.ensure_future(_finding(episodes, prompt, places)) for prompt in prompts]
        try:
            findings = [await each for each in track(waiting, "rows", disable=not shows, console=Terminal())]
            return sorted(findings, key=_natural)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        await asyncio.gather(scorer.close(), task.close())


def _without_agents(task: TaskConfig) -> TaskConfig:
    """Task whose commands are given by its rows, where a program would give them."""
    if task.name != "swe" or "agent" not in task.options:
        return task
    return replace(task, options={name: value for name, value in task.options.items() if name != "agent"})


def _check(config: Config, task: Task) -> None:
    """Errors: ConfigError for what has no rows with answers of their own."""
    if config.data.file:
        raise ConfigError("data.file has no reward: --rows is of tasks")
    if theirs := next((each.name for each in all_tasks(config.task).values() if each.name in TASKS_OF_OTHERS), None):
        raise ConfigError(
            f"task.name = {theirs!r} is played in an environment of others, whose rewards --rows cannot try"
        )
    if any(part.has_agent for part in parts_of(task)):
        raise ConfigError("agents of the task's own drive the model: --rows has no answers to script")


def _prompts(task: Task, seed: int, count: int) -> list[Prompt]:
    """``count`` prompts, or all, those that are trained on first. Errors: ConfigError."""
    if task.size is None and not count:
        raise ConfigError("the task has no end of prompts: give --rows a number")
    num_train, num_held_out = task.size or (count, 0)
    streams = [(EACH_ROW if task.size else "train", index) for index in range(num_train)]
    streams += [(HELD_OUT, index) for index in range(num_held_out)]
    return [task.prompt(stream, seed, index) for stream, index in streams[: count or None]]


async def _finding(episodes: ScriptedEpisodes, prompt: Prompt, places: asyncio.Semaphore) -> RowFinding:
    """Errors: ConfigError for a task without answers of its own."""
    place, answers = prompt.entry.get("place", prompt.id), worked_answers(task_of(episodes.task, prompt), prompt)
    async with places:
        own, failure = await _reward(episodes, prompt, answers)
        empty, another = await _reward(episodes, prompt, [""])
    return RowFinding(place, own, empty, failure or another)


async def _reward(episodes: ScriptedEpisodes, prompt: Prompt, answers: list[str]) -> tuple[float | None, str]:
    """Reward; None, and why, where there is none."""
    try:
        played = await episodes.play(prompt, answers)
    except Exception as error:  # an environment of the user's own may raise anything
        return None, what_happened(error)
    if played.score.status != "ok":
        return None, f"{played.score.status}: {played.score.message}"
    return played.reward, ""


def _natural(finding: RowFinding) -> list[tuple[int, str]]:
    """Order of places: line 9 before line 10."""
    parts = re.split(r"(\d+)", finding.place)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
