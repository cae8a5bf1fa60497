"""What a run directory says of a run, but for its rollouts: for people, in few words. Pure but for reading."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titan_rl.config.io.bounded_files import read_json, read_text
from titan_rl.diagnostics.ledger_report import discarded_of
from titan_rl.mesh.processes.processes import memory_bytes, process_state
from titan_rl.records.alarms.alarms import NAMES
from titan_rl.records.ledger.audit import UnreadableLedger, read
from titan_rl.records.ledger.ledger import read_account
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.run_directory.rundir import RunDir

_STATES = {"R": "works", "S": "waits", "D": "waits", "T": "stopped"}
_MENDS = {"trainer_repaired": "who", "generator_serves": "generator", "verifier_serves": "verifier"}
"""Events that tell of a mend."""
_MOST = 500
"""Events that are looked at, the last."""


@dataclass(frozen=True)
class Fault:
    time: float
    """Unix seconds."""
    what: str
    why: str
    mended: str
    """By what, and after how long; empty: by nothing that was recorded."""


@dataclass(frozen=True)
class Actor:
    name: str
    pid: int | None
    state: str
    memory_mib: int
    starts: int
    deaths: int


def state_of(run_dir: RunDir) -> tuple[str, str]:
    """State of a run, ``active`` or ``ended``, and its phase, or how it ended."""
    if run_dir.is_in_use():
        with suppress(OSError, ValueError):
            step, _, phase = read_text(run_dir.phase).strip().partition(" ")
            return "active", f"step {step}, {phase}"
        return "active", "starting"
    with suppress(OSError, ValueError, TypeError, KeyError):
        summary = read_json(run_dir.summary)
        return "ended", f"{summary['why_ended']} at step {summary['steps_done']}"
    return "ended", "without a word: it was killed"


def account_of(run_dir: RunDir) -> list[tuple[str, int]]:
    """Account of the samples: issued first, then trained, pending, and discarded by reason. Nothing where there is no
    ledger."""
    try:
        account = read(run_dir.ledger, read_account)
    except UnreadableLedger:
        return []
    rows = [("issued", account["issued"]), ("trained", account["trained"]), ("pending", account["pending"])]
    return rows + [(f"discarded: {reason}", count) for reason, count in discarded_of(account).items()]


def plain_events(run_dir: RunDir) -> list[dict[str, Any]]:
    """Last few hundred events with a time and a kind."""
    events = read_events(run_dir.root)
    return [e for e in events if isinstance(e.get("time"), int | float) and isinstance(e.get("kind"), str)][-_MOST:]


def faults_of(events: Iterable[dict[str, Any]]) -> list[Fault]:
    """Deaths and what replaced the dead, samples that could not be scored, prompts that were given up, the newest
    first."""
    events, faults = list(events), []
    for place, event in enumerate(events):
        match event["kind"]:
            case "died":
                what = f"{event.get('name')} died"
                faults.append(Fault(event["time"], what, str(event.get("why", "")), _mend(event, events[place + 1 :])))
            case "score_failed":
                what = f"{event.get('prompt')} sample {event.get('sample')} was not scored"
                faults.append(Fault(event["time"], what, str(event.get("why", "")), "not trained on"))
            case "score_retried":
                what = f"{event.get('samples')} samples of {event.get('prompt')} were not scored"
                faults.append(Fault(event["time"], what, str(event.get("why", "")), "its prompt was sampled again"))
            case "poison":
                what = f"{event.get('prompt')} was given up after {event.get('faults')} faults"
                faults.append(Fault(event["time"], what, str(event.get("why", "")), "discarded"))
            case "straggler":
                what = f"{event.get('name')} is slow at step {event.get('step')}"
                why = f"{_number(event.get('ratio')):.1f} times its peers' median"
                faults.append(Fault(event["time"], what, why, ""))
    return faults[::-1]


def _mend(died: dict[str, Any], later: list[dict[str, Any]]) -> str:
    name = str(died.get("name", ""))
    for event in later:
        kind = event["kind"]
        by = _MENDS.get(kind, "")
        is_it = name in str(event.get("who", "")).split(", ") or f"{by} {event.get('number')}" == _replica(name)
        if by and is_it:
            redone = f", {event['steps_redone']} steps redone" if event.get("steps_redone") else ""
            return f"replaced after {event['time'] - died['time']:.1f} s{redone}"
        if kind == "resumed":
            return f"resumed after {event['time'] - died['time']:.1f} s"
        if kind == "started" and event.get("name") == name:
            return f"started again after {event['time'] - died['time']:.1f} s"
    return ""


def _replica(name: str) -> str:
    """``generator 1 rank 0`` is of ``generator 1``."""
    return " ".join(name.split()[:2])


def actors_of(run_dir: RunDir, events: Iterable[dict[str, Any]]) -> list[Actor]:
    """Live actors as they are now, and earlier actors of the run."""
    pids: dict[str, int] = {}
    if run_dir.is_in_use():
        with suppress(OSError, ValueError, AttributeError):
            pids = {str(name): int(pid) for pid, name in read_json(run_dir.pids).items()}
    starts: dict[str, int] = dict.fromkeys(pids, 0)
    deaths: dict[str, int] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event["kind"] == "started" and not name.startswith("host"):
            starts[name] = starts.get(name, 0) + 1
        elif event["kind"] == "died":
            deaths[name] = deaths.get(name, 0) + 1
    return [_actor(name, pids.get(name), count, deaths.get(name, 0)) for name, count in sorted(starts.items())]


def _actor(name: str, pid: int | None, starts: int, deaths: int) -> Actor:
    if pid is None:
        return Actor(name, None, "gone", 0, starts, deaths)
    return Actor(name, pid, _STATES.get(process_state(pid), "gone"), memory_bytes(pid) >> 20, starts, deaths)


def alarms_of(records: list[dict[str, float]], events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Alarms of the run: name, first step, whether it stands, and in words."""
    last = next((record for record in reversed(records) if any(f"alarm_{name}" in record for name in NAMES)), {})
    raised = [event for event in events if event["kind"] == "alarm"]
    newest = {event.get("name"): place for place, event in enumerate(raised)}
    return [
        {
            "name": str(event.get("name")),
            "step": event.get("step"),
            "says": str(event.get("says", "")),
            "stands": newest[event.get("name")] == place and last.get(f"alarm_{event.get('name')}") == 1,
        }
        for place, event in enumerate(raised)
    ][::-1]


def _number(value: Any) -> float:
    return value if isinstance(value, float) else 0.0


def when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if 0 <= unix < 1e11 else ""
