"""Plain values as JSON with types, and a typed comparison.

``1``, ``1.0`` and ``True`` are three values here: equality is decided outside the sandbox, by nothing that a program
could have redefined. inside/running.py has the other end.
"""

from collections.abc import Hashable
from typing import Any

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MOST_DEEP = 60


def encode(value: Any) -> Any:
    """Encode a plain value for JSON. Errors: TypeError for what is no plain value."""
    kind = type(value)
    if kind in (str, bool, type(None)):
        return value
    if kind in (int, float):
        return {kind.__name__: repr(value)}
    if kind in _SEQUENCES.values():
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"{kind.__name__} is no plain value")


def decode(value: Any, depth: int = 0) -> Any:
    """Decode a value from a program. Errors: ValueError for what ``encode`` cannot make."""
    if value is None or type(value) in (str, bool):
        return value
    if type(value) is not dict or len(value) != 1 or depth > _MOST_DEEP:
        raise ValueError("no plain value")
    [(kind, inner)] = value.items()
    try:
        if kind in ("int", "float") and type(inner) is str:
            return int(inner) if kind == "int" else float(inner)
        if kind in _SEQUENCES and type(inner) is list:
            return _SEQUENCES[kind](decode(item, depth + 1) for item in inner)
        if kind == "dict" and type(inner) is list:
            return {decode(key, depth + 1): decode(item, depth + 1) for key, item in inner}
    except (TypeError, ValueError):  # what cannot be a key, pairs that are none, digits beyond Python's bound
        pass
    raise ValueError("no plain value")


def same(one: Any, other: Any) -> bool:
    """Whether values and all their types are equal; NaN equals nothing."""
    return _typed(one) == _typed(other)


def _typed(value: Any) -> Hashable:
    """Equal for values that are the same: in a set 1 and True are one, and the order of a set is anybody's."""
    kind = type(value)
    if kind in (list, tuple):
        return kind, tuple(map(_typed, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_typed, value))
    if kind is dict:
        return kind, frozenset((_typed(key), _typed(item)) for key, item in value.items())
    return kind, object() if value != value else value
