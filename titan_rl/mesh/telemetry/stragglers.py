"""Which actors are slow: each one's step times against the median of its peers. Pure, but for this process's clock."""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

_WINDOW = 8
"""Steps over which an actor is judged."""
_LIMIT = 1.5
"""Times its peers' median from which on an actor is a straggler."""
_LEAST_SECONDS = 0.005
"""An actor that takes less is not slow: such times are noise."""


def runnable_seconds() -> float:
    """Seconds that this process's threads ran or waited for a core.

    Waiting for others, in a collective say, does not count: it would make all ranks look alike. From Linux's schedstat.
    With a GPU it is the host's part of the work.
    """
    nanoseconds = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            ran, waited, _ = (thread / "schedstat").read_text().split()
        except OSError:  # it ended meanwhile
            continue
        nanoseconds += int(ran) + int(waited)
    return nanoseconds / 1e9


class Stragglers:
    """Recent step times of every actor."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, deque[float]]] = defaultdict(dict)
        self._of_last_step: dict[str, dict[str, float]] = {}
        self._known: set[str] = set()

    def note(self, kind: str, seconds: Mapping[str, float], work: Mapping[str, int] = MappingProxyType({})) -> None:
        """A step's seconds of all actors of a kind, by name; an actor that is not among them is forgotten. They are
        judged by what a piece of ``work`` took, of which each actor did so much, or else 1."""
        windows = self._seconds[kind]
        self._seconds[kind] = {name: windows.get(name, deque(maxlen=_WINDOW)) for name in seconds}
        self._of_last_step[kind] = dict(seconds)
        for name, value in seconds.items():
            self._seconds[kind][name].append(value / work.get(name, 1))

    @property
    def of_last_step(self) -> dict[str, float]:
        """Seconds that each actor worked in the last step that was noted."""
        return {name: value for actors in self._of_last_step.values() for name, value in actors.items()}

    def ratios(self) -> dict[str, float]:
        """Each actor's median over that of its peers, for kinds with more than one; full windows only."""
        return {name: ratio for actors in self._seconds.values() for name, ratio in _against_peers(actors)}

    def slowest(self) -> dict[str, float]:
        """The largest ratio of each kind, as metrics."""
        ratios_by_kind = {
            kind: [ratio for _, ratio in _against_peers(actors)] for kind, actors in self._seconds.items()
        }
        return {f"slowest_{kind}": max(ratios) for kind, ratios in ratios_by_kind.items() if ratios}

    def new(self) -> dict[str, float]:
        """New stragglers since the last call, with their ratios."""
        slow = {name: ratio for name, ratio in self.ratios().items() if ratio >= _LIMIT}
        new = {name: ratio for name, ratio in slow.items() if name not in self._known}
        self._known = set(slow)
        return new


def _against_peers(actors: dict[str, deque[float]]) -> Iterator[tuple[str, float]]:
    medians = {name: statistics.median(times) for name, times in actors.items() if len(times) == _WINDOW}
    for name, own in medians.items():
        if others := [median for other, median in medians.items() if other != name]:
            yield name, max(own, _LEAST_SECONDS) / max(statistics.median(others), _LEAST_SECONDS)
