"""Items to judge: a pair of answers to one prompt, or one answer, in a file of the collection.

    {"id": "0007", "prompt": "2+2=", "answers": ["4", "5"], "source": "pairs.jsonl line 3", "planted": "a"}

A prompt and its answers are text, or messages as data files have them. Numbers are given after all items were shuffled,
so that nothing on the page tells a planted pair from another.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titan_rl.config.io.bounded_files import each_once, json_fault, parse_json, read_lines
from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import joined
from titan_rl.data.rows.row_messages import TEMPLATE_OPTIONS, TOOLS, Schema
from titan_rl.data.rows.row_shapes import ParsedRow, Written, read_row
from titan_rl.data.seeds import named_seed
from titan_rl.data.storage.files import replace_text
from titan_rl.data.text.messages import content_of
from titan_rl.records.run_directory.rundir import sync_path

Mode = Literal["pairs", "ratings"]
CHOICES: dict[str, tuple[str, ...]] = {"pairs": ("a", "b", "tie", "both_bad"), "ratings": ("good", "bad", "unsure")}
"""Judgements of an item, by the mode of a collection; ``a`` is the first of an item's answers."""
MOST_ITEMS, MOST_CHARACTERS = 100_000, 200_000
"""Of a collection; of an item's prompt and answers together, which a page must show."""
ITEM_ID = re.compile(r"[0-9]{4,6}")
_LINE_BYTES, _MOST_SOURCE = 16 << 20, 1000


@dataclass(frozen=True)
class Item:
    """Prompt with two answers, or with one that is rated."""

    prompt: Written
    answers: tuple[Written, ...]
    source: str
    """Where it comes from: a file's line, or a run's step, prompt and samples."""
    planted: str = ""
    """Choice that is known to be right; empty: none is."""
    id: str = ""
    tools: Sequence[Schema] = ()
    template_options: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Characters of its prompt and answers."""
        return sum(len(shown(each)) for each in (self.prompt, *self.answers))

    @property
    def editable(self) -> str | None:
        """Text of a rated answer that a labeller may rewrite: its last message's content; None where that calls tools,
        and for pairs."""
        if len(self.answers) != 1:
            return None
        [answer] = self.answers
        if isinstance(answer, str):
            return answer
        return None if answer[-1].get("tool_calls") else content_of(answer[-1])

    @property
    def form(self) -> str | None:
        """System prompt of its messages, maybe empty, which a page shows; None for text."""
        if isinstance(self.prompt, str):
            return None
        return content_of(self.prompt[0]) if self.prompt[0]["role"] == "system" else ""

    @property
    def beside(self) -> dict[str, Any]:
        """Columns of a row beside its messages."""
        columns = {TOOLS: list(self.tools), TEMPLATE_OPTIONS: self.template_options}
        return {name: value for name, value in columns.items() if value}

    def as_dict(self) -> dict[str, Any]:
        planted = {"planted": self.planted} if self.planted else {}
        columns = {"id": self.id, "prompt": self.prompt, "answers": list(self.answers), "source": self.source}
        return columns | planted | self.beside


def shown(written: Written) -> str:
    """Text of a prompt or an answer, for a page."""
    return written if isinstance(written, str) else joined(written)


def pair_item(place: str, columns: dict[str, Any], planted: str = "") -> Item:
    """Item of a row with ``chosen`` and ``rejected``, or with two ``answers``. Errors: ConfigError."""
    if (answers := columns.get("answers")) is not None:
        if also := next((name for name in ("chosen", "rejected") if columns.get(name) is not None), None):
            raise ConfigError(f"{place}: 'answers' and {also!r}: keep 'answers', or 'chosen' and 'rejected'")
        if not isinstance(answers, list) or len(answers) != 2:
            raise ConfigError(f"{place}: 'answers' must be a list of two: give both, or 'chosen' and 'rejected'")
        columns = columns | {"chosen": answers[0], "rejected": answers[1]}
    return _item(read_row(place, columns, "pairs", "pairs"), planted)


def rated_item(place: str, columns: dict[str, Any], planted: str = "") -> Item:
    """Item of a row with ``prompt`` and ``completion``. Errors: ConfigError."""
    return _item(read_row(place, columns, "demonstrations", "prompt_completion"), planted)


def rated_items(pair: Item) -> list[Item]:
    """Both answers of a pair, one by one; of a planted pair the better one is good."""
    planted = {"a": ("good", "bad"), "b": ("bad", "good"), "": ("", "")}[pair.planted]
    return [
        replace(pair, answers=(answer,), planted=right) for answer, right in zip(pair.answers, planted, strict=True)
    ]


def _item(row: ParsedRow, planted: str) -> Item:
    item = Item(row.prompt, tuple(row.answers), row.place, planted, "", row.tools, row.template_options)
    if item.size > MOST_CHARACTERS:
        raise ConfigError(
            f"{row.place}: {item.size:,} characters are more than a page shows ({MOST_CHARACTERS:,}): leave the row out"
        )
    return item


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Items in a seeded order, numbered by it, each pair's answers too. Errors: ConfigError for none, or too many."""
    if not items:
        raise ConfigError("there is nothing to judge: give a source with prompts that have two different answers")
    if len(items) > MOST_ITEMS:
        raise ConfigError(f"{len(items):,} items are more than {MOST_ITEMS:,}: give --count")
    order = list(items)
    random.Random(named_seed("items", seed)).shuffle(order)
    return [
        replace(_turned(item, seed, number), id=f"{number:04d}", source=item.source[:_MOST_SOURCE])
        for number, item in enumerate(order)
    ]


def _turned(item: Item, seed: int, number: int) -> Item:
    """Item with its answers in an order that a seeded coin gives: alpha must not depend on that of a file."""
    if len(item.answers) < 2 or named_seed("turned", seed, number) % 2 == 0:
        return item
    return replace(item, answers=item.answers[::-1], planted={"a": "b", "b": "a"}.get(item.planted, ""))


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write all items, to stay. Errors: DiskFull."""
    replace_text(path, "".join(json.dumps(item.as_dict()) + "\n" for item in items))
    sync_path(path)


def read_items(path: Path, mode: Mode) -> list[Item]:
    """Items of a collection. Errors: ConfigError for what is none; OSError."""
    items: dict[str, Item] = {}
    for number, line in enumerate(read_lines(path, _LINE_BYTES), 1):
        item = _read(f"{path} line {number}", line, mode)
        if item.id in items or number > MOST_ITEMS:
            raise ConfigError(f"{path} line {number}: one item too many: restore the file")
        items[item.id] = item
    return list(items.values())


def _read(place: str, line: bytes, mode: Mode) -> Item:
    try:
        columns = parse_json(line, pairs=each_once)
    except ValueError as error:
        raise ConfigError(f"{place} is no item ({json_fault(error)}): restore the file") from None
    fields = columns if isinstance(columns, dict) else {}
    planted, answers = fields.get("planted", ""), fields.get("answers")
    name, source = (str(fields.get(key)) for key in ("id", "source"))
    if not ITEM_ID.fullmatch(name) or len(source) > _MOST_SOURCE:
        raise ConfigError(f"{place} is no item: restore the file")
    if not isinstance(planted, str) or planted not in ("", *CHOICES[mode][:2]) or not isinstance(answers, list):
        raise ConfigError(f"{place} is no item of a collection of {mode}: restore the file")
    if mode == "pairs":
        item = pair_item(place, fields, planted)
    elif len(answers) == 1:
        item = rated_item(place, fields | {"completion": answers[0]}, planted)
    else:
        raise ConfigError(f"{place} is no item with one answer: restore the file")
    return replace(item, id=name, source=source)
