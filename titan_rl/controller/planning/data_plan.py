"""What ``titan-rl plan`` sees of the data: how long prompts, or rows, are, where file and tokenizer are here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.schema import MADE, MADE_MODELS, TASKS_OF_FILES, TASKS_OF_OTHERS
from titan_rl.controller.preflight.checks import Checked, check_room, tokenizer_of, with_dataset
from titan_rl.controller.preflight.data_checks import row_notices
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.environments.rollout.answer_lengths import answer_notice
from titan_rl.environments.rollout.prompt_checks import encode_checked, place, training_prompts

_MOST = 512
"""Prompts that are looked at."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True)
class DataLengths:
    """Token counts of prompts or rows, with a line for people. None: not measured."""

    line: str
    mean: float | None = None
    longest: int | None = None

    def as_dict(self) -> dict[str, float | int | str | None]:
        return {"said": self.line, "mean_tokens": self.mean, "longest_tokens": self.longest}


def measure_data(checked: Checked) -> DataLengths:
    """Lengths of prompts or rows in tokens. Errors: ConfigError for an invalid row or one that is too long."""
    what = "rows of data.file" if checked.config.data.file else "prompts"
    if why := next(_hindrances(checked), ""):
        return DataLengths(f"{what}: not looked at, {why}")
    dataset = with_dataset(checked).dataset if checked.config.data.file else None
    if dataset is None:
        check_room(checked, prompts := _prompts(checked))
        lengths = [length for _, length in prompts]
        notices = answer_notice(checked.config, checked.task, lambda: tokenizer_of(checked.config))
    else:
        lengths, notices = dataset.train.num_tokens_R.tolist(), []
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    line = f"{what}: {mean:.0f} tokens on average, {longest} at most, of {len(lengths)} looked at"
    return DataLengths("; ".join([line, *row_notices(checked.task, dataset), *notices]), mean, longest)


def _hindrances(checked: Checked) -> Iterator[str]:
    """Why it cannot be looked at here."""
    config, folders = checked.config, checked.config.run.plugin_path
    path = Path(config.model.path)
    if config.model.path not in MADE_MODELS and not any((path / name).is_file() for name in _TOKENIZERS):
        yield "as the model's tokenizer is not here"
    files = [("data.file", config.data.file)] if config.data.file not in ("", MADE) else []
    for setting, task in all_tasks(config.task).items():
        if task.name in TASKS_OF_OTHERS and config.data.file in ("", MADE):
            yield f"as {setting}.name = {task.name!r} is played elsewhere"
        if task.name in TASKS_OF_FILES and config.data.file in ("", MADE):
            files.append((f"{setting}.options.file", task.options.get("file", "")))
    for setting, name in files:
        try:
            locate_sources(setting, name, folders)
        except ConfigError:
            if _is_here(name, folders):  # and nothing that a run can read
                raise
            yield f"as {setting} = {name!r} is not here"


def _is_here(files: Any, folders: Sequence[str]) -> bool:
    """Whether the files of a setting are all here, by their names."""
    entries = files if isinstance(files, list) else [files]
    names = [entry.get("path") if isinstance(entry, dict) else entry for entry in entries]
    return all(
        isinstance(name, str) and name and any(Path(folder, name).exists() for folder in folders or ["."])
        for name in names
    )


def _prompts(checked: Checked) -> list[tuple[str, int]]:
    """Places and tokens of the first prompts."""
    tokenizer, task = tokenizer_of(checked.config), checked.task
    prompts = islice(training_prompts(task, checked.config.run.seed, count=_MOST), _MOST)
    return [(place(prompt), len(encode_checked(task, tokenizer, prompt))) for prompt in prompts]
