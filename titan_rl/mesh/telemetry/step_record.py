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
    """Report of one rank on a step: spans and per-token results."""

    spans: list[Span] = field(default_factory=list)
    group: int = 0
    """Index of the data-parallel group whose rows the entries describe."""
    results: list[dict[int, RowResults]] = field(default_factory=list)
    """For each update, by the place of a row among those of the group."""


TokenResults = list[dict[tuple[int, int], RowResults]]
"""For each update, by (group of ranks, place of the row among its rows)."""


class StepRecord:
    """Spans and results of the last step; a bounded buffer."""

    def __init__(self) -> None:
        self._spans: deque[ActorSpan] = deque(maxlen=_MOST)
        self._results: TokenResults = []

    def note(self, actor: str, spans: Iterable[Span]) -> None:
        self._spans.extend(ActorSpan(actor, *span) for span in spans)

    @contextmanager
    def span(self, name: str, *actors: str) -> Iterator[None]:
        """Record a span of these actors over the ``with`` block."""
        begin = time.time()
        try:
            yield
        finally:
            for actor in actors:
                self._spans.append(ActorSpan(actor, name, begin, time.time() - begin))

    def trained(self, reports: Mapping[str, RankReport], of_policy: Sequence[str]) -> None:
        """Record a trained step, by rank name. ``of_policy``: ranks that hold the policy."""
        for actor, rank in reports.items():
            self.note(actor, rank.spans)
        self._results = join_results([reports[name] for name in of_policy])

    def take_spans(self) -> list[ActorSpan]:
        spans = sorted(self._spans, key=lambda span: span.begin)
        self._spans.clear()
        return spans

    def take_results(self) -> TokenResults:
        """Results of the last trained step; cleared."""
        results, self._results = self._results, []
        return results


def join_results(ranks: Iterable[RankReport]) -> TokenResults:
    """Results of all ranks, joined by update."""
    joined: TokenResults = []
    for rank in ranks:
        joined += [{} for _ in range(len(rank.results) - len(joined))]
        for update, rows in enumerate(rank.results):
            joined[update] |= {(rank.group, place): values for place, values in rows.items()}
    return joined
