"""Every key of a TOML with its default and a line about it: what ``titan-rl train --help`` ends with.

The lines are those that stand under the fields in the sources, ours and TorchTitan's.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from titan_rl.config.schema import OUR_SECTIONS, Config
from titan_rl.trainer.titan_config import titan_keys

_WIDTH = 110


def key_help() -> str:
    """All sections, ours first."""
    ours = get_type_hints(Config)
    lines = [line for section in OUR_SECTIONS for line in _section(section, ours[section], {})]
    for section, (cls, known) in titan_keys().items():
        lines += _section(section, cls, known)
    return "\n".join(lines)


def _section(section: str, cls: type, known: dict[str, Any]) -> Iterator[str]:
    """``known``: the keys that are taken, to their defaults; empty: all, with those of the class."""
    said = {name: line for base in reversed(cls.__mro__[:-1]) for name, line in _field_lines(base).items()}
    keys = known or {f.name: _default(f) for f in fields(cls) if not f.name.startswith("_")}
    yield f"\n[{section}]"
    for key, default in keys.items():
        yield f"  --{section}.{key}  ({default!r})"
        if line := said.get(key):
            yield textwrap.fill(line, _WIDTH, initial_indent="      ", subsequent_indent="      ")


def _default(field: Field) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _field_lines(cls: type) -> dict[str, str]:
    """Field to what the string under it says."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
