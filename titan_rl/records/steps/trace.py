"""Spans of each step, a JSON line a step, for the page and ``titan-rl trace``.

    {"step": 3, "spans": [["trainer rank 0", "optimizer", 1790000000.1234, 0.0123], ...]}

At most MOST_SPANS a step, the longest, and at most twice LARGEST bytes: what is older is dropped.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_lines
from titan_rl.data.storage.files import LineFile
from titan_rl.mesh.telemetry.step_record import ActorSpan

MOST_SPANS = 400
LARGEST = 32 << 20
_TOUCH = 2e-4
"""Seconds by which spans that follow each other may overlap: clocks are read one after the other."""
_NAME, _BEFORE = "trace.jsonl", "trace.before.jsonl"


Trace = dict[int, list[ActorSpan]]
"""By step, each in the order of their beginnings."""


def longest(spans: Sequence[tuple], most: int = MOST_SPANS) -> list[tuple]:
    """Longest spans, in their order; ``spans`` are tuples of actor, name, begin and seconds."""
    places = sorted(range(len(spans)), key=lambda place: -spans[place][3])[:most]
    return [spans[place] for place in sorted(places)]


def write_trace(root: Path, step: int, spans: Iterable[tuple[str, str, float, float]]) -> None:
    """Append a step's spans. Errors: DiskFull."""
    path = root / _NAME
    if path.is_file() and path.stat().st_size > LARGEST:
        os.replace(path, root / _BEFORE)
    ordered = sorted(spans, key=lambda span: span[2])
    rows = [[actor, name, round(begin, 5), round(seconds, 6)] for actor, name, begin, seconds in longest(ordered)]
    file = LineFile(path)
    try:
        file.write(json.dumps({"step": step, "spans": rows}, separators=(",", ":")))
    finally:
        file.close()


def read_trace(root: Path, first: int = 0, last: int | None = None) -> Trace:
    """Spans of these steps; one that was done again after a resume counts once, the last time. What is no record is
    passed over."""
    trace: Trace = {}
    for line in _lines(root):
        step, spans = _as_step(line)
        if step >= first and (last is None or step <= last):
            trace[step] = spans
    return dict(sorted(trace.items()))


def trace_size(root: Path) -> int:
    """Bytes of it: another number where a step was added."""
    return sum(path.stat().st_size for name in (_BEFORE, _NAME) if (path := root / name).is_file())


def _lines(root: Path) -> Iterator[str]:
    for name in (_BEFORE, _NAME):
        if (path := root / name).is_file():
            yield from (line.decode(errors="replace") for line in read_lines(path))


def _as_step(line: str) -> tuple[int, list[ActorSpan]]:
    """-1 for what is no record."""
    try:
        record = json.loads(line)
        spans = record["spans"][:MOST_SPANS]
        return int(record["step"]), [span for each in spans if (span := _as_span(each)) is not None]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return -1, []


def _as_span(values: Any) -> ActorSpan | None:
    actor, name, begin, seconds = values
    if not (isinstance(actor, str) and isinstance(name, str)):
        return None
    span = ActorSpan(actor, name, float(begin), float(seconds))
    return span if 0 <= span.seconds < 1e9 and abs(span.begin) < 1e12 else None


def lanes(spans: Sequence[ActorSpan]) -> list[int]:
    """First free lane of each span of an actor, in the order of their beginnings: overlapping spans are in different
    ones."""
    free: list[int] = []
    occupied: list[tuple[float, int]] = []
    lane_numbers = []
    for span in spans:
        while occupied and occupied[0][0] <= span.begin + _TOUCH:
            heappush(free, heappop(occupied)[1])
        lane_numbers.append(heappop(free) if free else len(occupied))
        heappush(occupied, (span.begin + span.seconds, lane_numbers[-1]))
    return lane_numbers


def by_actor(spans: Iterable[ActorSpan]) -> dict[str, list[ActorSpan]]:
    """Spans by actor, in order: the controller first, then trainers, generators, verifiers."""
    order = {"controller": 0, "trainer": 1, "generator": 3, "verifier": 4}
    grouped: dict[str, list[ActorSpan]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        grouped.setdefault(span.actor, []).append(span)
    return dict(sorted(grouped.items(), key=lambda item: (order.get(item[0].split()[0], 2), item[0])))


def as_chrome(trace: Trace) -> dict[str, Any]:
    """Trace in the format of Chrome's trace viewer and Perfetto: an actor is a process, its lanes are threads;
    microseconds from the first span on."""
    spans = [span for of_step in trace.values() for span in of_step]
    start = min((span.begin for span in spans), default=0.0)
    steps = {span: step for step, of_step in trace.items() for span in of_step}
    events: list[dict[str, Any]] = []
    for pid, (actor, own) in enumerate(by_actor(spans).items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": actor.split()[0],
                "pid": pid,
                "tid": lane,
                "ts": round(1e6 * (span.begin - start), 1),
                "dur": round(1e6 * span.seconds, 1),
                "args": {"step": steps[span]},
            }
            for span, lane in zip(own, lanes(own), strict=True)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}
