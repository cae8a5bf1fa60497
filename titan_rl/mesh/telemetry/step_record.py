"""Spans and per-token trainer results of a step, collected from actors for the controller.

Dimensions: S trained tokens of a row.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from titan_rl.data.spans import Span

_MOST = 4096
"""Spans that nobody has taken: a bench or a replay takes none."""


class ActorSpan(NamedTuple):
    actor: str
    name: str
    begin: float
    """Unix seconds."""
    seconds: float


RowResults = np.ndarray
"""Float32 [1, S]: the trainer's log-probabilities before the update; or [2, S], the advantages that the loss got below
them, where the trainer refined those that it was given."""


@dataclass(frozen=True)
class RankReport:
    """By one rank, of a step."""

    spans: list[Span] = field(default_factory=list)
    group: int = 0
    """Index of the data-parallel group whose rows the entries describe."""
    results: list[dict[int, RowResults]] = field(default_factory=list)
    """For each update, by the place of a row among those of the group."""


TokenResults = list[dict[tuple[int, int], RowResults]]
"""For each update, by (group of ranks, place of the row among its rows)."""


class StepRecord:
    """Owns it. What nobody takes is forgotten."""

    def __init__(self) -> None:
        self._spans: deque[ActorSpan] = deque(maxlen=_MOST)
        self._results: TokenResults = []

    def note(self, actor: str, spans: Iterable[Span]) -> None:
        self._spans.extend(ActorSpan(actor, *span) for span in spans)

    @contextmanager
    def span(self, name: str, *actors: str) -> Iterator[None]:
        """The block is what these actors do meanwhile."""
        begin = time.time()
        try:
            yield
        finally:
            for actor in actors:
                self._spans.append(ActorSpan(actor, name, begin, time.time() - begin))

    def trained(self, reports: Mapping[str, RankReport], of_policy: Sequence[str]) -> None:
        """A step, by each rank's name. ``of_policy``: the ranks that hold the policy; the last step's replaces what
        was known."""
        for actor, rank in reports.items():
            self.note(actor, rank.spans)
        self._results = join_results([reports[name] for name in of_policy])

    def take_spans(self) -> list[ActorSpan]:
        spans = sorted(self._spans, key=lambda span: span.begin)
        self._spans.clear()
        return spans

    def take_results(self) -> TokenResults:
        """Of the step that was trained last."""
        results, self._results = self._results, []
        return results


def join_results(ranks: Iterable[RankReport]) -> TokenResults:
    """What all ranks found together."""
    joined: TokenResults = []
    for rank in ranks:
        joined += [{} for _ in range(len(rank.results) - len(joined))]
        for update, rows in enumerate(rank.results):
            joined[update] |= {(rank.group, place): values for place, values in rows.items()}
    return joined
