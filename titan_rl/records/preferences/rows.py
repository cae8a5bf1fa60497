"""Rows to train on: pairs, labels and demonstrations, in the shapes that ``data.file`` takes. Pure but for writing and
printing.

    preferences.jsonl   prompt, chosen, rejected    dpo, simpo, orpo, reward_model
    labels.jsonl        prompt, completion, label   kto
    edits.jsonl         prompt, completion          sft

A pair or a label is the majority's: more than half of all who judged. Planted items are left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.io.printable import say
from titan_rl.data.rows.row_shapes import Written
from titan_rl.data.storage.files import replace_text
from titan_rl.records.preferences.items import Item
from titan_rl.records.preferences.journal import Latest
from titan_rl.records.preferences.judgements import Judgement

PREFERENCES, LABELS, EDITS = "preferences.jsonl", "labels.jsonl", "edits.jsonl"
FILES = (PREFERENCES, LABELS, EDITS)
Row = dict[str, Any]
Judged = Mapping[str, Sequence[Judgement]]
_LABELS = {"a": (True, False), "b": (False, True), "both_bad": (False, False), "good": (True,), "bad": (False,)}
"""Labels of an item's answers, by the majority's choice; of the others none."""


def judged_items(latest: Latest) -> dict[str, list[Judgement]]:
    """Judgements that count, by item."""
    judged: dict[str, list[Judgement]] = {}
    for judgement in latest.values():
        judged.setdefault(judgement.item, []).append(judgement)
    return judged


def majority(choices: Sequence[str]) -> str | None:
    """Choice of more than half of all; None without one."""
    if not choices:
        return None
    [(choice, count)] = Counter(choices).most_common(1)
    return choice if 2 * count > len(choices) else None


def decision(judgements: Sequence[Judgement]) -> str | None:
    """Majority's choice; None without one."""
    return majority([judgement.choice for judgement in judgements])


def rows_of(items: Sequence[Item], judged: Judged) -> dict[str, list[Row]]:
    """Rows by the name of their file."""
    rows: dict[str, list[Row]] = {name: [] for name in FILES}
    for item in items:
        judgements = () if item.planted else judged.get(item.id, ())
        rows[PREFERENCES] += _pairs(item, judgements)
        rows[LABELS] += _labels(item, decision(judgements))
        rows[EDITS] += _edits(item, judgements)
    return rows


def _pairs(item: Item, judgements: Sequence[Judgement]) -> Iterator[Row]:
    choice = decision(judgements)
    if choice in ("a", "b"):
        chosen, rejected = item.answers if choice == "a" else item.answers[::-1]
        votes = dict(Counter(judgement.choice for judgement in judgements))
        own = {"chosen": votes.pop(choice), "rejected": votes.pop("b" if choice == "a" else "a", 0)}
        yield row_of(item, chosen=chosen, rejected=rejected, votes=own | votes)


def _labels(item: Item, choice: str | None) -> Iterator[Row]:
    for answer, label in zip(item.answers, _LABELS.get(choice or "", ()), strict=False):
        yield row_of(item, completion=answer, label=label)


def _edits(item: Item, judgements: Sequence[Judgement]) -> Iterator[Row]:
    """Each edit once that is another answer."""
    edits = dict.fromkeys(judgement.edit for judgement in judgements if judgement.edit)
    for edit in edits:
        if item.editable not in (None, edit):
            yield row_of(item, completion=_edited(item.answers[0], edit))


def _edited(answer: Written, edit: str) -> Written:
    """Answer with another text, which of messages is the last one's content."""
    if isinstance(answer, str):
        return edit
    return [*answer[:-1], {**answer[-1], "content": edit}]


def row_of(item: Item, **columns: Any) -> Row:
    """Row of an item's prompt, with what is beside its messages and where it is from."""
    return {"prompt": item.prompt, **columns, **item.beside, "item": item.id, "source": item.source}


def write_rows(folder: Path, rows: Mapping[str, Sequence[Row]]) -> dict[str, int]:
    """Write the files that have rows, and remove others of an earlier majority; rows by file. Errors: DiskFull."""
    for name, of_file in rows.items():
        if of_file:
            replace_text(folder / name, "".join(json.dumps(row) + "\n" for row in of_file))
        else:
            (folder / name).unlink(missing_ok=True)
    return {name: len(of_file) for name, of_file in rows.items() if of_file}


def say_result(folder: Path, written: Mapping[str, int], summary: dict[str, Any] | str) -> None:
    """Print a summary and the rows by file: as JSON, or, if it is a table, as lines for people."""
    if isinstance(summary, dict):
        return say(json.dumps(summary | {"rows": written}))
    say("\n".join([summary, *(f"wrote {folder / name}: {count} rows" for name, count in written.items())]))
