"""Lists of texts on the command line, where one text may stand for a list of one."""

from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from titan_rl.config.sections.schema import OUR_SECTIONS, Config

TITAN_TEXT_LISTS = (("compile", "components"), ("float8", "filter_fqns"))
"""Lists of texts in TorchTitan's sections."""


def lists_meant(text: str) -> list[list[str]]:
    """Lists that a text may stand for; one, of the text itself, where it looks like no list."""
    several = [part.strip().strip("'\"") for part in text.removeprefix("[").removesuffix("]").split(",")]
    return [[text], several] if len(several) > 1 or text.startswith("[") else [[text]]


def with_lists(overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides in which one text for a list of texts is a list; one that may stand for several is left, and refused
    where it is read."""

    def listed(section: str, key: str, value: Any) -> Any:
        is_one = isinstance(value, str) and lists_meant(value) == [[value]]
        return [value] if is_one and (section, key) in _text_lists() else value

    tables = {section: table for section, table in overrides.items() if isinstance(table, dict)}
    return overrides | {
        section: {key: listed(section, key, value) for key, value in table.items()} for section, table in tables.items()
    }


@cache
def _text_lists() -> frozenset[tuple[str, str]]:
    """Sections and keys of lists of texts."""
    classes = get_type_hints(Config)
    ours = ((name, field.name) for name in OUR_SECTIONS for field in fields(classes[name]) if holds_texts(field.type))
    return frozenset({*ours, *TITAN_TEXT_LISTS})


def holds_texts(kind: Any) -> bool:
    """Whether a type is that of a list of texts, or of texts and numbers."""
    [item] = get_args(kind) if get_origin(kind) is list else [None]
    kinds = get_args(item) if isinstance(item, UnionType) else (getattr(item, "__origin__", item),)
    return str in kinds
