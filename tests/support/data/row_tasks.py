"""Data files for tests, and tasks over them."""

import json
from pathlib import Path

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.prompts.stream import held_out_prompts
from titan_rl.environments.registry import make_task


def sums(count: int) -> list[dict]:
    return [{"question": f"{n}+{n}=", "answer": 2 * n} for n in range(count)]


def write(folder: Path, rows: list, name: str = "questions.jsonl") -> Path:
    (folder / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return folder / name


_OF_TASK = ("style", "system_prompt", "reward", "rewards_by_source")


def rows_task(folder: Path, **settings):
    """Task of ``questions.jsonl``. ``settings``: of the task, or else of its options."""
    of_task = {key: settings.pop(key) for key in _OF_TASK if key in settings}
    task = TaskConfig(name="jsonl", **of_task, options={"file": "questions.jsonl"} | settings)
    return make_task(task, [str(folder)])


def mistake(folder: Path, **settings) -> str:
    """The one line of the ConfigError that the settings or the file earn."""
    with pytest.raises(ConfigError) as caught:
        held_out_prompts(rows_task(folder, **settings), 1)
    [line] = str(caught.value).splitlines()
    return line


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]
