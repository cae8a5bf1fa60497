"""Who did what when, in the cheapest form: a few spans a step. They travel in messages.

A span begins at a wall clock's time, so that those of several processes of a host stand side by side.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_MOST = 64
"""Spans that are kept of a name between two looks; then those with the smallest gaps between them become one."""
_GAP_SECONDS = 0.01


class Span(NamedTuple):
    name: str
    begin: float
    """Unix seconds."""
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class Spans:
    """What one actor did since somebody took it. Not more than a few hundred, however often ``add`` is called."""

    def __init__(self) -> None:
        self._of: dict[str, list[Span]] = {}
        self._gap: dict[str, float] = {}

    def add(self, name: str, begin: float, seconds: float) -> None:
        """One that begins where the last of its name ended goes on with it. Of a name they come in order."""
        known = self._of.setdefault(name, [])
        if known and begin - known[-1].end <= self._gap.get(name, _GAP_SECONDS):
            known[-1] = known[-1]._replace(seconds=max(begin + seconds - known[-1].begin, known[-1].seconds))
            return
        known.append(Span(name, begin, seconds))
        while len(known) > _MOST:
            self._gap[name] = 2 * self._gap.get(name, _GAP_SECONDS)
            self._of[name] = known = merged(known, self._gap[name])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The block's."""
        begin = time.time()
        try:
            yield
        finally:
            self.add(name, begin, time.time() - begin)

    def take(self) -> list[Span]:
        """In the order of their beginnings."""
        taken = sorted((span for spans in self._of.values() for span in spans), key=lambda span: span.begin)
        self._of, self._gap = {}, {}
        return taken


def merged(spans: list[Span], gap: float) -> list[Span]:
    """Those of one name in order, with no more than ``gap`` seconds between them, as one."""
    found: list[Span] = []
    for span in spans:
        if found and span.begin - found[-1].end <= gap:
            end = max(found[-1].end, span.end)
            found[-1] = found[-1]._replace(seconds=end - found[-1].begin)
        else:
            found.append(span)
    return found
