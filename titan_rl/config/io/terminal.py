"""A rich console that shows text alone, whoever wrote it (config/io/printable.py)."""

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from titan_rl.config.io.printable import printable_lines

_SIZES = ("COLUMNS", "LINES", "JUPYTER_COLUMNS", "JUPYTER_LINES")
_MOST_DIGITS = 4
"""Of a size."""


def _environment() -> dict[str, str]:
    """Without sizes that rich cannot read, or would fill the memory with."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _SIZES or (value.isdecimal() and len(value) <= _MOST_DIGITS)
    }


class Terminal(Console):
    """Console for plain text: no markup is read from lines and cells, and no control sequence passes. Rich's own still
    do: colours, and those that draw a table anew."""

    def __init__(self, *, force_jupyter: bool | None = None, force_terminal: bool | None = None, quiet: bool = False):
        settings: dict[str, Any] = {"force_jupyter": force_jupyter, "force_terminal": force_terminal, "quiet": quiet}
        super().__init__(**settings, markup=False, emoji=False, highlight=False, _environ=_environment())

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)
