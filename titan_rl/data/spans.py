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
    """Recorder of one actor's spans since the last ``take``. Not more than a few hundred, however often ``add`` is
    called."""

    def __init__(self) -> None:
        self._of: dict[str, list[Span]] = {}
        self._gap: dict[str, float] = {}

    def add(self, name: str, begin: float, seconds: float) -> None:
        """Add a span; one that begins where the last of its name ended extends it. Spans of a name come in order."""
        spans = self._of.setdefault(name, [])
        if spans and begin - spans[-1].end <= self._gap.get(name, _GAP_SECONDS):
            spans[-1] = spans[-1]._replace(seconds=max(begin + seconds - spans[-1].begin, spans[-1].seconds))
            return
        spans.append(Span(name, begin, seconds))
        while len(spans) > _MOST:
            self._gap[name] = 2 * self._gap.get(name, _GAP_SECONDS)
            self._of[name] = spans = merged(spans, self._gap[name])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The block's."""
        begin = time.time()
        try:
            yield
        finally:
            self.add(name, begin, time.time() - begin)

    def take(self) -> list[Span]:
        """Take all spans, in the order of their beginnings."""
        ordered = sorted((span for spans in self._of.values() for span in spans), key=lambda span: span.begin)
        self._of, self._gap = {}, {}
        return ordered


def merged(spans: list[Span], gap: float) -> list[Span]:
    """Spans of one name, with gaps of up to ``gap`` seconds closed."""
    joined: list[Span] = []
    for span in spans:
        if joined and span.begin - joined[-1].end <= gap:
            end = max(joined[-1].end, span.end)
            joined[-1] = joined[-1]._replace(seconds=end - joined[-1].begin)
        else:
            joined.append(span)
    return joined
