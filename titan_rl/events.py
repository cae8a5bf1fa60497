"""What befell a run, as JSON lines beside its log: who started, who died and why, and when all was whole again."""

import json
import os
import threading
import time
from pathlib import Path

CHAOS_FOLDER = "TITAN_RL_CHAOS"
"""Environment variable of a run under fire: processes obey what is put there under their id."""
_EVENTS = "events.jsonl"
_OBEY_SECONDS = 0.05


class EventLog:
    """The only writer of ``events.jsonl``."""

    def __init__(self, root: Path):
        self._file = open(root / _EVENTS, "a", buffering=1)  # noqa: SIM115  (closed by close)

    def write(self, kind: str, **fields) -> None:
        self._file.write(json.dumps({"time": time.time(), "kind": kind, **fields}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_events(root: Path) -> list[dict]:
    path = root / _EVENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def obey_chaos() -> None:
    """In a run under fire: leave, as cleanly as it can look, when told to. Otherwise nothing."""
    folder = os.environ.get(CHAOS_FOLDER)
    if not folder:
        return
    order = Path(folder) / str(os.getpid())

    def obey() -> None:
        while not order.exists():
            time.sleep(_OBEY_SECONDS)
        os._exit(0)

    threading.Thread(target=obey, name="chaos", daemon=True).start()
