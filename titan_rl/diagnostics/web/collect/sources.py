"""Items of data files, and of what a task asks. Pure but for reading."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.file_sources import check_unweighted, list_names, locate_sources, read_sources
from titan_rl.data.rows.public_shapes import as_example
from titan_rl.data.rows.row_files import RawRow
from titan_rl.data.seeds import named_seed
from titan_rl.data.text.messages import message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task
from titan_rl.records.preferences.items import Item, Mode, pair_item, rated_item, rated_items, shown

_T = TypeVar("_T")


def file_items(setting: str, file: str, mode: Mode, *, count: int | None = None, seed: int = 1) -> list[Item]:
    """Items of a file's rows, in order; ``count``: of so many rows, drawn. Errors: ConfigError that names the row."""
    rows = _rows(setting, file)
    return [item for row in (rows if count is None else drawn(rows, count, seed)) for item in _row_items(row, mode)]


def drawn(values: Iterable[_T], count: int, seed: int) -> list[_T]:
    """Sample of ``count`` values, or all if there are fewer, in their order; all are as likely (reservoir)."""
    draw, kept = random.Random(named_seed("rows", seed)), dict[int, tuple[int, _T]]()
    for number, value in enumerate(values):
        place = number if number < count else draw.randrange(number + 1)
        if place < count:
            kept[place] = (number, value)
    return [value for _, value in sorted(kept.values(), key=lambda each: each[0])]


def _rows(setting: str, file: str) -> Iterator[RawRow]:
    """Errors: ConfigError, also without any."""
    check_unweighted(setting, file)
    sources, is_empty = locate_sources(setting, file, []), True
    try:
        for _, row in read_sources(sources):
            is_empty = False
            yield row
    except OSError as error:
        raise ConfigError(f"cannot read {list_names(sources)}: {error}") from None
    if is_empty:
        raise ConfigError(f"{setting} = {file!r} holds no rows: give another file")


def _row_items(row: RawRow, mode: Mode) -> list[Item]:
    place, columns = row
    if columns.get("answers") is None:
        is_pair = mode == "pairs" or columns.get("chosen") is not None
        columns = as_example(place, columns, "pairs" if is_pair else "demonstrations", frozenset())
        if not is_pair:
            return [rated_item(place, columns)]
    pair = pair_item(place, columns)
    return [pair] if mode == "pairs" else rated_items(pair)


def planted_items(file: str, mode: Mode) -> list[Item]:
    """Items whose right choice is known: of each row a pair, or two answers. Errors: ConfigError."""
    return [item for row in _rows("--planted", file) for item in _planted(row, mode)]


def _planted(row: RawRow, mode: Mode) -> list[Item]:
    place, columns = row
    if columns.get("chosen") is None:
        raise ConfigError(f"{place}: a planted pair has 'chosen', the better answer, and 'rejected'")
    pair = pair_item(place, as_example(place, columns, "pairs", frozenset()), "a")
    pair = replace(pair, source=f"planted, {pair.source}")
    return [pair] if mode == "pairs" else rated_items(pair)


def check_forms(planted: Sequence[Item], forms: set[str | None]) -> None:
    """Check that a page shows planted items as it shows the others.

    ``forms``: of the others. Errors: ConfigError for text beside messages, or for another system prompt."""
    names = {None: "text", "": "messages without a system prompt"}
    if other := next((item for item in planted if item.form not in forms), None):
        form, others = (
            names.get(each, f"messages with the system prompt {str(each)[:40]!r}")
            for each in (other.form, min(forms, key=str))
        )
        raise ConfigError(
            f"{other.source}: it is {form}, and what is judged is {others}, so that people would recognise it: "
            f"write it alike"
        )


def disguised(planted: Sequence[Item], others: Sequence[Item], seed: int) -> list[Item]:
    """Planted items of which a prompt comes as often as among the others: one answer of two, where each comes once."""
    prompts = [shown(item.prompt) for item in others]
    if len(set(prompts)) < len(prompts):
        return list(planted)
    rows = [list(items) for _, items in groupby(planted, lambda item: item.source)]
    return [random.Random(named_seed("planted answer", seed, number)).choice(row) for number, row in enumerate(rows)]


def asked_item(task: Task, prompt: Prompt, answers: Sequence[str], source: str) -> Item:
    """Item of a prompt as its task asks it, with the tools and the template's options of the prompt."""
    if prompt.images:
        raise ConfigError(f"{prompt.id} shows images, which people are not shown here: collect on prompts of text")
    asked = task.messages(prompt)
    if isinstance(asked, str):
        return Item(asked, tuple(answers), source)
    written = tuple([message("assistant", answer)] for answer in answers)
    return Item(asked, written, source, tools=task.tools_of(prompt), template_options=prompt.template_options)
