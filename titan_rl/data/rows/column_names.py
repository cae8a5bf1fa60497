"""Columns by names of ours: ``columns = { question = "problem", answer = "reward_model.ground_truth" }``. Pure."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from titan_rl.config.load import ConfigError, nearest

ASKED = ("prompt", "question", "messages", "answer", "tests", "data_source")
"""Names of ours that a row of prompts may have."""
LEARNED = {
    "demonstrations": ("messages", "prompt", "completion", "text", "question", "answer"),
    "pairs": ("prompt", "question", "chosen", "rejected", "margin"),
    "labels": ("prompt", "completion", "question", "answer", "label"),
}
"""Names of ours that a row of data may have, by its kind (row_shapes.py)."""
SAME = {"question": "prompt", "answer": "completion"}
"""Names of ours for the same column of a row to learn from."""
SHARED = ("chat_template_kwargs", "tools")
_DEPTH = 4

Columns = dict[str, Any]


def check_names(setting: str, mapping: Mapping[str, str], known: Collection[str], whose: str = "name of ours") -> None:
    """Check of a ``columns`` table. Errors: ConfigError for a name that is none of ours."""
    for ours, theirs in mapping.items():
        if ours not in known and ours not in SHARED:
            raise ConfigError(f"{setting}.{ours} = {theirs!r}: {ours!r} is no {whose}: {nearest(ours, known)}")


def check_learned_names(setting: str, mapping: Mapping[str, str], kind: str) -> None:
    """Check of a ``columns`` table of data. Errors: ConfigError for a name that rows of the kind have not, or twice."""
    check_names(setting, mapping, LEARNED[kind], f"column of {kind}")
    if twice := next((name for name, same in SAME.items() if {name, same} <= set(mapping)), None):
        raise ConfigError(f"{setting}: {twice!r} and {SAME[twice]!r} are the same column of {kind}: keep one of them")


def with_same(columns: Columns, mapped: Collection[str]) -> tuple[Columns, frozenset[str]]:
    """Row to learn from whose mapped question and answer are its prompt and completion, and all names mapped so."""
    same = {ours: columns.get(name) for name, ours in SAME.items() if name in mapped}
    return columns | same, frozenset([*mapped, *same])


def with_names(place: str, columns: Columns, mapping: Mapping[str, str], setting: str) -> Columns:
    """Row with columns of ours beside its own. Errors: ConfigError for a column that the row has not."""
    if not mapping:
        return columns
    return columns | {ours: _value(place, columns, f"{setting}.{ours}", path) for ours, path in mapping.items()}


def _value(place: str, columns: Columns, setting: str, path: str) -> Any:
    if path in columns:
        return columns[path]
    value: Any = columns
    for part in path.split("."):
        if value is None:
            return None  # of Parquet, where each row has all columns
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(f"{place}: {setting} = {path!r}: the row has none: {nearest(path, _paths(columns))}")
        value = value[part]
    return value


def at(columns: Columns, path: str) -> Any:
    """Value at a dotted path; None without."""
    value: Any = columns
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _paths(columns: Columns, depth: int = _DEPTH) -> Iterator[str]:
    for name, value in columns.items():
        yield name
        if isinstance(value, dict) and depth:
            yield from (f"{name}.{path}" for path in _paths(value, depth - 1))
