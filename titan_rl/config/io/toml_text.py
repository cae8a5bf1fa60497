"""A configuration as the text of a TOML: what ``titan-rl train --print-config`` prints."""

import json
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """One section after the other. What is None is left out: TOML has no such value, and it is the default."""
    return "\n\n".join(
        "\n".join([f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in _set(table))])
        for name, table in tables.items()
    )


def _set(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else _json(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(key))} = {_value(part)}" for key, part in _set(value))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int | str):
        return _json(value)
    return repr(value) if isinstance(value, float) else _json(str(value))


def _json(value: bool | int | str) -> str:
    """As TOML writes it, too: it has no pairs of escapes for one sign, and wants DEL as one."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
