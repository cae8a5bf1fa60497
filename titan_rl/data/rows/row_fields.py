"""What stands in a column of a data file's row: text and numbers, each checked. Errors name place and column.

Messages are row_messages.py's.
"""

import difflib
import json
import math
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.text.messages import Message, content_of, reasoning_of

_LARGEST_WHOLE, _LEAST = 2**53, Decimal("1e-15")
"""Up to the first, doubles hold every whole number."""
_MOST_DIGITS = 15
"""Decimal digits that every double holds."""
EXACT = Context(prec=60)
"""The thread's own context is anybody's: some libraries round all decimals to a few digits."""
_SHOWN_NAMES = 8


def text(place: str, name: str, value: Any) -> str:
    """Text column of a row. Errors: ConfigError for anything but text that is not empty."""
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name!r} is {shown(value)}: give text")
    if not value.strip():
        raise ConfigError(f"{place}: {name!r} is empty: give text, or leave the row out")
    return encodable(place, name, value)


def written(value: int | float | Decimal) -> str:
    """A number as an answer would write it: ``72.0``, as pandas has 72 beside a missing cell, is ``72``.

    Errors: ValueError for NaN and infinity, and for a number that has no short form: rounding is all that it holds.
    """
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no answer: give text, or a number")
    exact = (value if isinstance(value, Decimal) else Decimal(repr(float(value)))).normalize(EXACT)
    if exact == exact.to_integral_value() and exact.copy_abs() <= _LARGEST_WHOLE:
        return str(int(exact))
    if len(exact.as_tuple().digits) > _MOST_DIGITS or not _LEAST <= exact.copy_abs() <= _LARGEST_WHOLE:
        raise ValueError(
            f"{value} is a number with a rounding error, or of no common form: write it as text, such as "
            f"{float(value):.6g}"
        )
    return format(exact, "f")


def encodable(place: str, name: str, text: str) -> str:
    """Text that has a UTF-8 form. Errors: ConfigError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: {name!r} holds half a character (a lone surrogate) at {error.start}") from None
    return text


def check_finite(place: str, columns: dict[str, Any]) -> None:
    """Check of a row's numbers, for columns that a program computes with. Errors: ConfigError for NaN and infinity,
    which JSON has not."""
    for name, value in columns.items():
        if (number := _not_finite(value)) is not None:
            raise ConfigError(
                f"{place}: column {name!r} holds {number}: give a number or null, or leave the column out"
            )


def _not_finite(value: Any) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((number for part in parts if (number := _not_finite(part)) is not None), None)


def joined(messages: Sequence[Message]) -> str:
    """Conversation as one text, for comparison."""
    if len(messages) == 1:
        return said(messages[0])
    return "\n".join(f"{message['role']}: {said(message)}" for message in messages)


def said(message: Message) -> str:
    """Content of a message, with its reasoning and its tool calls, for comparison."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [*reasoning_of(message).values(), content_of(message), *calls]))


def names(columns: dict[str, Any], expected: Sequence[str]) -> str:
    """List of a row's columns beside the expected ones, the likely misspelling first."""
    close = [name for name in columns if difflib.get_close_matches(name, expected, n=1, cutoff=0.7)]
    ordered = list(dict.fromkeys([*close, *columns]))
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    empty = [name for name in expected if columns.get(name, "") is None]
    listing = f"it has {', '.join(map(repr, ordered[:_SHOWN_NAMES]))}{more}" if ordered else "it is empty"
    return f"{listing}, but {', '.join(map(repr, empty))} is null" if empty else listing


def shown(value: Any) -> str:
    """Value for a message, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
