"""Sources of what is judged: data files of pairs or answers, and answers that a run recorded.

A run's answers are those of one turn that ended by themselves. Two that differ are drawn for a pair, by the seed. A
chat's question becomes messages, so that what is trained on is written by the same template.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, read_resolved
from titan_rl.config.sections.schema import MIXTURE
from titan_rl.data.rows.file_sources import check_unweighted, list_names, locate_sources, read_sources
from titan_rl.data.rows.public_shapes import as_example
from titan_rl.data.rows.row_files import RawRow
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Group, Message, Rollout, message
from titan_rl.records.preferences.items import MOST_CHARACTERS, Item, Mode, pair_item, rated_item, rated_items
from titan_rl.records.run_directory.rundir import existing_run_dir, is_on_data
from titan_rl.records.steps.rollouts import RolloutsError, read_rollouts, recorded_steps

_CONVERSATION = re.compile(r"(system|user|assistant|tool): .*\n(user|assistant|tool): ", re.DOTALL)
"""Several messages as a run records them: one text, which cannot be taken apart again."""


def file_items(setting: str, file: str, mode: Mode, *, are_planted: bool = False) -> list[Item]:
    """Items of a file's rows, in order. Errors: ConfigError that names the row."""
    check_unweighted(setting, file)
    sources = locate_sources(setting, file, [])
    try:
        items = [item for _, row in read_sources(sources) for item in _row_items(row, mode, are_planted)]
    except OSError as error:
        raise ConfigError(f"cannot read {list_names(sources)}: {error}") from None
    if not items:
        raise ConfigError(f"{setting} = {file!r} holds no rows: give another file")
    return items


def _row_items(row: RawRow, mode: Mode, is_planted: bool) -> list[Item]:
    place, columns = row
    if is_planted and columns.get("chosen") is None:
        raise ConfigError(f"{place}: a planted pair has 'chosen', the better answer, and 'rejected'")
    if columns.get("answers") is None:
        is_pair = mode == "pairs" or columns.get("chosen") is not None
        columns = as_example(place, columns, "pairs" if is_pair else "demonstrations", frozenset())
        if not is_pair:
            return [rated_item(place, columns)]
    pair = pair_item(place, columns, "a" if is_planted else "")
    return [pair] if mode == "pairs" else rated_items(pair)


def run_items(run: Path, mode: Mode, *, step: int | None, count: int, seed: int) -> list[Item]:
    """Up to ``count`` items of a run's prompts, of the newest steps, or of one. Errors: ConfigError."""
    run_dir = existing_run_dir(run)
    if is_on_data(run_dir):
        raise ConfigError(f"{run} is a run on data.file, which samples no answers: give --pairs FILE")
    steps = recorded_steps(run_dir.rollouts)
    if not steps and (run / "tokenizer.json").is_file():
        raise ConfigError(f"{run} is a model: give --prompts FILE with what it is to answer")
    if not steps:
        raise ConfigError(f"{run} holds no rollouts yet: give a run that has done a step with a generator")
    if step is not None and step not in steps:
        raise ConfigError(f"step {step} is not recorded: give --step {steps[0]} to {steps[-1]}")
    task = read_resolved(run_dir.config).get("task", {})
    items: list[Item] = []
    for number in reversed(steps) if step is None else [step]:
        items += _step_items(run_dir.rollouts, number, mode, task, seed)
        if len(items) >= count:
            break
    if not items:
        raise ConfigError(f"{run} has no prompt with answers to judge: each needs a turn that ended by itself")
    return items[:count]


def _step_items(folder: Path, step: int, mode: Mode, task: dict[str, Any], seed: int) -> Iterator[Item]:
    try:
        groups = read_rollouts(folder, step)
    except (RolloutsError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    for group in groups:
        if item := _group_item(group, step, mode, task, seed):
            yield item


def _group_item(group: Group, step: int, mode: Mode, task: dict[str, Any], seed: int) -> Item | None:
    """Item of a prompt; None without answers that can be judged."""
    answers = list({rollout.text: rollout for rollout in group.rollouts if _is_whole(rollout)}.values())
    number = 2 if mode == "pairs" else 1
    if len(answers) < number or not group.question.strip():
        return None
    drawn = random.Random(named_seed("answers", seed, step, group.prompt_id)).sample(answers, number)
    source = f"step {step} {group.prompt_id} samples {', '.join(str(rollout.sample) for rollout in drawn)}"
    item = written_item(group.question, [rollout.text for rollout in drawn], source, _system(task, group.task))
    is_joined = not isinstance(item.prompt, str) and bool(_CONVERSATION.match(group.question))
    return None if is_joined or item.size > MOST_CHARACTERS else item


def _is_whole(rollout: Rollout) -> bool:
    return rollout.status == "ok" and len(rollout.turns) == 1 and not rollout.branches and bool(rollout.text.strip())


def written_item(prompt: str | list[Message], answers: Sequence[str], source: str, system: str | None) -> Item:
    """Item of text, or of messages where ``system`` is not None: it begins a chat, unless it is empty."""
    if system is None:
        return Item(prompt, tuple(answers), source)
    asked = [message("user", prompt)] if isinstance(prompt, str) else prompt
    begun = [message("system", system)] if system else []
    return Item([*begun, *asked], tuple([message("assistant", answer)] for answer in answers), source)


def _system(task: Any, part: str) -> str | None:
    """System prompt of a run's chats, maybe empty; None where its prompts are text."""
    table = task if isinstance(task, dict) else {}
    if table.get("name") == MIXTURE:
        parts = table.get("options")
        own = parts.get(part) if isinstance(parts, dict) else None
        table = table | (own if isinstance(own, dict) else {})
    prompt = table.get("system_prompt")
    return None if table.get("style") != "chat" else prompt if isinstance(prompt, str) else ""


def planted_items(file: str, mode: Mode) -> list[Item]:
    """Items whose right choice is known. Errors: ConfigError."""
    items = file_items("--planted", file, mode, are_planted=True)
    return [replace(item, source=f"planted, {item.source}") for item in items]
