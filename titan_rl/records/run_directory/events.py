"""The events of a run, as JSON lines: which process started, died (and why), and when it was replaced."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_lines
from titan_rl.data.storage.files import LineFile, unless_full

_EVENTS = "events.jsonl"


class EventLog:
    """The only writer of ``events.jsonl``."""

    def __init__(self, root: Path) -> None:
        self._file = LineFile(root / _EVENTS)

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event. After ``close`` nothing is written: the deaths of processes that were stopped are no events
        of the run.

        Nor on a full disk: who repairs the run tells of it here, and must not fail for that.
        """
        if not self._file.is_closed:
            with unless_full():
                self._file.write(json.dumps({"time": time.time(), "kind": kind, **fields}))

    def close(self) -> None:
        self._file.close()


def read_events(root: Path) -> list[dict[str, Any]]:
    """Events in order. A line that is cut short, since the process died while writing it, is left out."""
    path, events = root / _EVENTS, []
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]
