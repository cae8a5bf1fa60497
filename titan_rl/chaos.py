"""``titan-rl chaos CONFIG --kills N --seed S``: a training under fire, and what became of it.

Victims, moments and ways are drawn by seed: any trainer rank, generator or verifier, in any phase of a step, by
SIGKILL, SIGSTOP or an exit that looks clean. For each fault there is a witness that it happened, and when it was
noticed and when all was whole again, as the run's own events tell.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.config import ConfigError, load_config
from titan_rl.events import CHAOS_FOLDER, read_events
from titan_rl.ledger import Ledger
from titan_rl.titan_config import build_titan

KINDS = ("trainer", "generator", "verifier")
PHASES = ("generating", "training", "publishing", "saving")
WAYS = ("kill", "stop", "exit")
_WHOLE = {"trainer": "trainer_whole", "generator": "generator_serves", "verifier": "verifier_serves"}
_PHASE_SECONDS = 2.0
"""How long a phase is waited for; then any will do."""
_POLL_SECONDS = 0.0005


@dataclass(frozen=True)
class Fault:
    """What is to happen: to whom, after which step, in which phase of the next one, and how."""

    after_step: int
    kind: str
    phase: str
    way: str


@dataclass
class Struck:
    """What happened."""

    fault: Fault
    victim: str = ""
    pid: int = 0
    phase: str = ""
    """In which it was really struck."""
    witness: str = ""
    """The process's state before and after, as the kernel tells it."""
    time: float = 0.0
    noticed_after: float | None = None
    whole_after: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def draw_faults(count: int, seed: int, steps: int) -> list[Fault]:
    """Spread over the run, every kind, phase and way in turn, in an order drawn by seed. Pure."""
    chosen = random.Random(seed)
    all_of = {
        name: [values[i % len(values)] for i in range(count)]
        for name, values in (("kind", KINDS), ("phase", PHASES), ("way", WAYS))
    }
    for values in all_of.values():
        chosen.shuffle(values)
    last = max(steps - 3, 2)
    when = sorted(chosen.randint(1, last) for _ in range(count))
    return [Fault(step, *parts) for step, *parts in zip(when, *all_of.values(), strict=True)]


def chaos(
    config_file: str | None, overrides: dict[str, dict[str, Any]], *, kills: int, seed: int, as_json: bool
) -> int:
    """0 if the run went through all its steps, lost nothing and left nobody behind; else 1. Errors: ConfigError."""
    config = load_config(config_file, overrides)
    steps = build_titan(config).training.steps
    if kills < 1 or steps < 4:
        raise ConfigError("chaos needs at least one fault (--kills) and four steps (--training.steps)")
    with tempfile.TemporaryDirectory(prefix="titan_rl_chaos_") as folder:
        root = Path(config.run.dir or Path(folder) / "run")
        report = _Run(root, config_file, overrides).under_fire(draw_faults(kills, seed, steps), steps)
    print(json.dumps(report, indent=2) if as_json else _for_people(report))
    return 0 if report["ok"] else 1


class _Run:
    """A training in a process of its own, and whoever strikes it."""

    def __init__(self, root: Path, config_file: str | None, overrides: dict[str, dict[str, Any]]):
        self.root = root
        self.victims = root.parent / f"{root.name}-{CHAOS_FOLDER}"
        tables = {section: values for section, values in overrides.items() if section != "run"}
        run = overrides.get("run", {}) | {"dir": str(root)}
        arguments = [
            part
            for section, values in (tables | {"run": run}).items()
            for key, value in values.items()
            for part in (f"--{section}.{key}", json.dumps(value))
        ]
        file = ["--job.config_file", config_file] if config_file else []
        self.command = [sys.executable, "-m", "titan_rl.train", *file, *arguments]

    def under_fire(self, faults: list[Fault], steps: int) -> dict[str, Any]:
        self.victims.mkdir(parents=True, exist_ok=True)
        start = time.time()
        with open(self.root.parent / f"{self.root.name}.out", "w") as output:
            environment = os.environ | {CHAOS_FOLDER: str(self.victims)}
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        chosen = random.Random(len(faults))
        struck = []
        for fault in faults:
            done = self._strike(fault, chosen)
            if done is None:
                break
            struck.append(done)
        code = self.process.wait()
        events = read_events(self.root)
        for one in struck:
            _match(one, events)
        return self._report(code, struck, len(faults), steps, time.time() - start, events)

    def _position(self) -> tuple[int, str]:
        """Steps done, and the phase that the run is in."""
        with suppress(OSError, ValueError):
            step, phase = (self.root / "phase").read_text().split()
            return int(step), phase
        return -1, ""

    def _strike(self, fault: Fault, chosen: random.Random) -> Struck | None:
        """None if the run ended before."""
        deadline = None
        while True:
            if self.process.poll() is not None:
                return None
            step, phase = self._position()
            if step >= fault.after_step:
                deadline = deadline or time.monotonic() + _PHASE_SECONDS
                if phase == fault.phase or time.monotonic() > deadline:
                    names = json.loads((self.root / "pids.json").read_text())
                    alive = sorted((name, int(pid)) for pid, name in names.items() if name.startswith(fault.kind))
                    if alive:
                        break
            time.sleep(_POLL_SECONDS)
        name, pid = chosen.choice(alive)
        before, now = _state(pid), time.time()
        _inflict(fault.way, pid, self.victims)
        after = _await_change(pid, before)
        return Struck(fault, name, pid, phase, f"{before} -> {after}", now)

    def _report(self, code, struck, asked: int, steps: int, seconds: float, events: list[dict]) -> dict[str, Any]:
        summary = json.loads((self.root / "summary.json").read_text()) if (self.root / "summary.json").exists() else {}
        started = {event["pid"] for event in events if event["kind"] == "started"}
        left = sorted(pid for pid in started if _state(pid) not in ("gone", "Z"))
        account = Ledger(self.root / "ledger.db").account()
        witnessed = [one for one in struck if one.witness.split(" -> ")[0] != one.witness.split(" -> ")[1]]
        return {
            "ok": code == 0 and summary.get("steps_done") == steps and len(witnessed) == asked and not left,
            "exit_code": code,
            "steps_done": summary.get("steps_done"),
            "steps_asked": steps,
            "faults_asked": asked,
            "faults_witnessed": len(witnessed),
            "seconds": seconds,
            "account": account,
            "processes_left": left,
            "held_out_after": summary.get("held_out_after"),
            "why_ended": summary.get("why_ended"),
            "by_kind": {kind: _medians([one for one in struck if one.fault.kind == kind]) for kind in KINDS},
            "faults": [asdict(one) for one in struck],
        }


def _state(pid: int) -> str:
    """As in /proc: R, S, D run, T is stopped, Z is dead; ``gone``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _inflict(way: str, pid: int, victims: Path) -> None:
    if way == "exit":
        (victims / str(pid)).write_text("exit")
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)


def _await_change(pid: int, before: str) -> str:
    """The state that the fault brought about."""
    deadline = time.monotonic() + 5.0
    while (state := _state(pid)) not in ("gone", "Z", "T") and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return "gone" if state in ("gone", "Z") else state


def _match(one: Struck, events: list[dict]) -> None:
    """When the run knew, and when that kind was whole again."""
    later = [event for event in events if event["time"] >= one.time]
    died = next((event for event in later if event["kind"] == "died" and event["pid"] == one.pid), None)
    whole = next((event for event in later if event["kind"] == _WHOLE[one.fault.kind]), None)
    if died is not None:
        one.noticed_after = died["time"] - one.time
    if whole is not None:
        one.whole_after = whole["time"] - one.time
        one.details = {name: whole[name] for name in ("step", "steps_redone") if name in whole}


def _medians(struck: list[Struck]) -> dict[str, Any]:
    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(statistics.median(known), 3) if known else None

    return {
        "faults": len(struck),
        "noticed_after_median": median([one.noticed_after for one in struck]),
        "noticed_after_median_killed": median([one.noticed_after for one in struck if one.fault.way != "stop"]),
        "whole_after_median": median([one.whole_after for one in struck]),
    }


def _for_people(report: dict[str, Any]) -> str:
    lines = [
        f"{report['faults_witnessed']} of {report['faults_asked']} faults, {report['steps_done']} of "
        f"{report['steps_asked']} steps in {report['seconds']:.0f} s, exit code {report['exit_code']}",
        f"ledger: {report['account']}; processes left: {report['processes_left'] or 'none'}",
    ]
    for kind, medians in report["by_kind"].items():
        lines.append(f"{kind:>10}: " + ", ".join(f"{name} {value}" for name, value in medians.items()))
    return "\n".join(lines)
