"""Answers of a model to be judged: sampled by the engines of ``titan-rl eval``, before the page is served."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.controller.preflight.checks import Checked
from titan_rl.diagnostics.evaluation.command import OF_SUITES, checked_suites, sampled_answers
from titan_rl.diagnostics.web.collect.arguments import MAX_NEW_TOKENS, TEMPERATURE
from titan_rl.diagnostics.web.collect.sources import asked_item
from titan_rl.environments.rollout.suites import Suite
from titan_rl.records.evaluations.results import Answer, Question
from titan_rl.records.preferences.items import MOST_CHARACTERS, Item, Mode

_SUITE = "collect"
_SETTING = f"eval.suites.{_SUITE}"
_ARGUMENTS = {
    "max_new_tokens": "--max-new-tokens",
    "temperature": "--temperature",
    "prompts": "--count",
    "task.options.file": "--prompts",
    "file": "--prompts",
}
"""Arguments that set a suite's keys."""
_REWARD = "titan_rl.environments.rewards.unscored:zero"


def model_items(
    options: argparse.Namespace,
    overrides: dict[str, dict[str, Any]],
    mode: Mode,
    seed: int,
    check: Callable[[set[str | None]], None],
) -> list[Item]:
    """Items of prompts that the model answers: two different answers of each, or one.

    ``check``: of the prompts' forms, before anything is sampled. Errors: ConfigError."""
    checked = checked_prompts(options, overrides, 2 if mode == "pairs" else 1, seed)
    [suite] = checked.suites
    check({asked_item(suite.task, prompt, (), "").form for prompt in suite.prompts})
    [result] = sampled_answers(checked)
    if result.unscored:
        say(f"{len(result.unscored)} prompts were not answered, {result.first_failure}", sys.stderr)
    items = [item for question in result.questions if (item := _item(suite, question, mode))]
    if not items:
        raise ConfigError(
            f"no prompt of {options.prompts} has answers to judge: each must end by itself, and two must differ; raise "
            f"--max-new-tokens or --temperature"
        )
    say(f"{len(items)} of {len(suite.prompts)} prompts have answers to judge", sys.stderr)
    return items


def checked_prompts(
    options: argparse.Namespace, overrides: dict[str, dict[str, Any]], num_answers: int, seed: int
) -> Checked:
    """Checked configuration of a model with one suite: the prompts of the file, each to be answered so often. Errors:
    ConfigError."""
    with _errors_of_arguments():
        return checked_suites(*_evaluation(options, overrides, num_answers, seed))


@contextmanager
def _errors_of_arguments() -> Iterator[None]:
    """Errors name arguments of this command in the place of the suite's settings."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for key, argument in _ARGUMENTS.items():
            text = text.replace(f"{_SETTING}.{key}", argument)
        raise ConfigError(text.replace(_SETTING, "--prompts")) from None


def _evaluation(
    options: argparse.Namespace, overrides: dict[str, dict[str, Any]], num_answers: int, seed: int
) -> tuple[argparse.Namespace, dict[str, dict[str, Any]]]:
    """Arguments of an evaluation that asks the prompts of the file."""
    suite = {
        "name": _SUITE,
        "task": {"name": "jsonl", "reward": _REWARD, "options": {"file": options.prompts}},
        "samples": num_answers,
        "temperature": TEMPERATURE if options.temperature is None else options.temperature,
        "max_new_tokens": options.max_new_tokens or MAX_NEW_TOKENS,
        "prompts": options.count or 0,
    }
    sections = {**overrides, "model": overrides.get("model", {}) | {"path": str(options.source)}}
    sections["run"] = {"seed": seed} | overrides.get("run", {})
    sections["eval"] = overrides.get("eval", {}) | {"suites": [suite]}
    given = dict.fromkeys((*OF_SUITES, "config", "task", "thinking_budget"))
    return argparse.Namespace(**given | {"dir": str(options.source), "suite": [_SUITE]}), sections


def _item(suite: Suite, question: Question, mode: Mode) -> Item | None:
    """Item of a prompt; None without answers that can be judged."""
    [prompt] = [prompt for prompt in suite.prompts if prompt.id == question.id]
    answers = list(dict.fromkeys(answer.text for answer in question.answers if _is_whole(answer)))
    if len(answers) < (2 if mode == "pairs" else 1):
        return None
    item = asked_item(suite.task, prompt, answers, str(prompt.entry["place"]))
    return item if item.size <= MOST_CHARACTERS else None


def _is_whole(answer: Answer) -> bool:
    return answer.status == "ok" and bool(answer.text.strip())
