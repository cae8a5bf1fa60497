"""Answers that a run recorded, each with the prompt that its model was asked.

The run's task makes a prompt again, by its id; it is taken only if its tokens are those that the run recorded.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.controller.preflight.checks import tokenizer_of
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Group, Prompt, Rollout
from titan_rl.diagnostics.web.collect.sources import asked_item
from titan_rl.environments.interfaces.task import task_of
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_part
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.records.preferences.items import MOST_CHARACTERS, Item, Mode
from titan_rl.records.run_directory.path_checks import check_no_modules
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir, is_on_data
from titan_rl.records.steps.rollouts import RolloutsError, read_rollouts, recorded_steps

_PROMPT_ID = re.compile(r"train/[0-9]{1,12}")


def run_items(
    run: Path, mode: Mode, *, step: int | None, count: int, seed: int, folders: Sequence[str] = ()
) -> list[Item]:
    """Up to ``count`` items of a run's prompts, of the newest steps, or of one.

    ``folders``: where the task's code is, if it is the user's. Errors: ConfigError, also where it cannot be told what
    the model was asked."""
    run_dir = existing_run_dir(run)
    steps = _steps(run, run_dir)
    if step is not None and step not in steps:
        raise ConfigError(f"step {step} is not recorded: give --step {steps[0]} to {steps[-1]}")
    check_no_modules(run)
    items: list[Item] = []
    for number in reversed(steps) if step is None else [step]:
        items += _step_items(run_dir, number, mode, seed, folders)
        if len(items) >= count:
            break
    if not items:
        raise ConfigError(f"{run} has no prompt with answers to judge: each needs a turn that ended by itself")
    return items[:count]


def _steps(run: Path, run_dir: RunDir) -> list[int]:
    """Errors: ConfigError if there are none."""
    if is_on_data(run_dir):
        raise ConfigError(f"{run} is a run on data.file, which samples no answers: give --pairs FILE")
    steps = recorded_steps(run_dir.rollouts)
    if not steps and (run / "tokenizer.json").is_file():
        raise ConfigError(f"{run} is a model: give --prompts FILE with what it is to answer")
    if not steps:
        raise ConfigError(f"{run} holds no rollouts yet: give a run that has done a step with a generator")
    return steps


def _step_items(run_dir: RunDir, step: int, mode: Mode, seed: int, folders: Sequence[str]) -> Iterator[Item]:
    try:
        groups = read_rollouts(run_dir.rollouts, step)
    except (RolloutsError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    prompts = None
    for group in groups:
        if drawn := _drawn(group, step, mode, seed):
            prompts = prompts or _Prompts(run_dir, step, folders)
            item = prompts.item(group, drawn)
            if item.size <= MOST_CHARACTERS:
                yield item


def _drawn(group: Group, step: int, mode: Mode, seed: int) -> list[Rollout]:
    """Two different answers, or one, by the seed; empty without answers that can be judged."""
    answers = list({rollout.text: rollout for rollout in group.rollouts if _is_whole(rollout)}.values())
    number = 2 if mode == "pairs" else 1
    if len(answers) < number:
        return []
    return random.Random(named_seed("answers", seed, step, group.prompt_id)).sample(answers, number)


def _is_whole(rollout: Rollout) -> bool:
    return rollout.status == "ok" and len(rollout.turns) == 1 and not rollout.branches and bool(rollout.text.strip())


class _Prompts:
    """Prompts of a run's step. Errors: ConfigError if its task or its tokenizer is not there any more."""

    def __init__(self, run_dir: RunDir, step: int, folders: Sequence[str]) -> None:
        config = load_recorded(run_dir, run_dir.config_of(step), folders)
        self._tokenizer, self._step = tokenizer_of(config), step
        self._stream = PromptStream(make_part(config.task, config.run.plugin_path), config.run.seed)

    def item(self, group: Group, drawn: Sequence[Rollout]) -> Item:
        """Item of a group's answers. Errors: ConfigError if their prompt is another than the task makes."""
        prompt = self._prompt(group)
        task = task_of(self._stream.task, prompt)
        tokens = encode_prompt(task, self._tokenizer, prompt)
        if not all(np.array_equal(rollout.tokens[: rollout.turns[0].start], tokens) for rollout in drawn):
            raise ConfigError(
                f"step {self._step} {group.prompt_id}: the run's task makes another prompt than was recorded, so "
                f"nobody can tell what was asked: put its data, model and release back, or give --pairs FILE"
            )
        samples = ", ".join(str(rollout.sample) for rollout in drawn)
        source = f"step {self._step} {group.prompt_id} samples {samples}"
        return asked_item(task, prompt, [rollout.text for rollout in drawn], source)

    def _prompt(self, group: Group) -> Prompt:
        if not _PROMPT_ID.fullmatch(group.prompt_id):
            raise ConfigError(f"step {self._step}: {group.prompt_id[:40]!r} is no prompt of a run: give --pairs FILE")
        return self._stream.by_id(group.prompt_id)
