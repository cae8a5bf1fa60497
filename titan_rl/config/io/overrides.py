"""Settings that go over a TOML's: as arguments, ``--section.key value``, and as dotted names from Python."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import tomli

from titan_rl.config.errors import ConfigError

_PLAIN = re.compile(r"[\w./:@+][\w./:@+-]*", re.ASCII)
"""Texts that no shell and no TOML reads as anything else, unless they are a value's name."""


def is_override(argument: str) -> bool:
    """Whether it has the form ``--section.key``, with a value or without."""
    return argument.startswith("--") and "." in argument.partition("=")[0]


def join_overrides(arguments: list[str]) -> list[str]:
    """``["--training.steps", "20"]`` becomes ``["--training.steps=20"]``; a bare flag is true, the rest stays."""
    joined, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if is_override(argument) and "=" not in argument:
            argument += f"={rest.pop(0) if rest and not rest[0].startswith('--') else 'true'}"
        joined.append(argument)
    return joined


def parse_overrides(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """``["--training.steps", "20"]`` becomes ``{"training": {"steps": 20}}``; a bare flag is true; deeper dots nest."""
    overrides: dict[str, dict[str, Any]] = {}
    for argument in join_overrides(arguments):
        name, _, text = argument[2:].partition("=")
        *path, key = name.split(".")
        if not is_override(argument) or not all([*path, key]):
            raise ConfigError(f"cannot read {argument!r}: overrides look like --section.key value")
        table = overrides
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--{name} and another override exclude each other: {part} is a value or a table")
        table[key] = _toml_value(text)
    return overrides


def overriding(
    dotted: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    hint: Callable[[str], str] = lambda name: "",
) -> dict[str, dict[str, Any]]:
    """Overrides of both forms as one nested table. ``hint``: what a name without a section may stand for.

    Errors: ConfigError for a name that is no ``section.key``, or that is given twice."""
    tables: dict[str, dict[str, Any]] = {name: dict(_table(name, values)) for name, values in sections.items()}
    for name, value in dotted.items():
        *path, key = name.split(".")
        if not path or not all([*path, key]):
            mend = hint(name) if not path else ""
            raise ConfigError(f"{name!r} is no setting: " + (mend or "give section.key, such as 'training.steps'"))
        table = tables
        for part in path:
            table = _table(part, table.setdefault(part, {}))
        if key in table:
            raise ConfigError(f"{name} is given twice: once is enough")
        table[key] = value
    return tables


def _table(name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} = {values!r}: a section is a dict, such as training={{'steps': 20}}")
    return values


def override_arguments(overrides: dict[str, Any]) -> list[str]:
    """Arguments that ``parse_overrides`` turns into a table."""
    return list(_overrides(overrides, ""))


def _overrides(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _overrides(value, f"{prefix}{key}.")
        else:  # numbers, strings, booleans and lists of them look the same in JSON and in TOML, but for DEL
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            yield f"--{prefix}{key}={value if _is_plain(value) else text}"


def _is_plain(value: Any) -> bool:
    """Whether a text stands for itself, without quotes."""
    return isinstance(value, str) and bool(_PLAIN.fullmatch(value)) and _toml_value(value) == value


def _toml_value(text: str) -> Any:
    """A value as a TOML writes it, or else the text itself."""
    try:
        tables = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also for numbers and nests beyond what Python reads
        return _json_table(text)
    return tables["value"] if len(tables) == 1 else text


def _json_table(text: str) -> Any:
    """A table as JSON writes it, or else the text itself."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
