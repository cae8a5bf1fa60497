"""How long a repair takes after a kill, in a run of two generators that continues meanwhile.

Each kill waits until a standby, or a spare, is ready again; ``titan-rl chaos`` measures faults in close succession.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.config.load import load_config
from titan_rl.config.shipped import shipped
from titan_rl.diagnostics.bench.harness import row
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.run_directory.events import read_events

_BAR_COLD, _BAR_SPARE, _BAR_TRAINER = 1.3, 2.0, 3.0
_ROUNDS = 5
_WAIT_SECONDS = 180.0
_CHAOS = shipped()["chaos"]
_COLD = """
import sys
from pathlib import Path
from titan_rl.config.load import load_config
from titan_rl.generator.engine import GenerationEngine
GenerationEngine(load_config(sys.argv[1]).generator, sys.argv[2], 64)
print("up", flush=True)
"""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    load_config(_CHAOS, overrides)
    cold = statistics.median(_cold_start() for _ in range(3))
    with _run(overrides, {}) as root:
        _await_standbys(root)
        trainer = _replacements(root, "trainer rank 1", "trainer_repaired", ("standby_waits", {"of": "trainer"}))
        generator = _replacements(root, "generator 1", "generator_serves", ("standby_waits", {"of": "generator"}))
    with _run(overrides, {"warm_spares": 1}) as root:
        _await_standbys(root)
        spare = _replacements(root, "generator 1", "generator_serves", ("spare_waits", {}))
    return [
        row("trainer rank repaired", statistics.median(trainer), "s", _BAR_TRAINER, all=trainer),
        row("cold start of an engine, on a machine that does nothing else", cold, "s"),
        row("generator replaced", statistics.median(generator), "s", all=generator),
        row("  against a cold start", statistics.median(generator) / cold, "ratio", _BAR_COLD),
        row("generator replaced by a spare", statistics.median(spare), "s", _BAR_SPARE, all=spare),
    ]


def _cold_start() -> float:
    """Seconds from starting a process to an engine that accepts requests."""
    from titan_rl.mesh.resources.cores import available_cores, generator_environment, share_cores

    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as model:
        make_tiny(Path(model), seed=1)
        environment = os.environ | generator_environment(share_cores(available_cores(), 1, 1, True), True)
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", _COLD, str(_CHAOS), model], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None, "it is a pipe"
        try:
            while process.stdout.readline().strip() != "up":
                if process.poll() is not None:
                    raise RuntimeError("the engine did not start")
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


@contextmanager
def _run(overrides: dict[str, dict[str, Any]], recovery: dict[str, Any]) -> Iterator[Path]:
    """The directory of a run that lasts until the context is left."""
    tables = overrides | {
        "training": {"steps": 100_000},
        "mesh": {"worker_loops": 0},
        "recovery": overrides.get("recovery", {}) | recovery,
    }
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        root = Path(folder) / "run"
        values = [(f"--{s}.{key}", json.dumps(value)) for s, table in tables.items() for key, value in table.items()]
        arguments = [part for pair in values for part in pair]
        command = [sys.executable, "-m", "titan_rl.train", "--job.config_file", str(_CHAOS), "--run.dir", str(root)]
        with open(Path(folder) / "out", "w") as output:
            process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output, start_new_session=True)
        try:
            yield root
        finally:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(_WAIT_SECONDS)


def _await_standbys(root: Path) -> None:
    for kind in ("trainer", "generator", "verifier"):
        _event(root, 0.0, "standby_waits", {"of": kind})


def _replacements(root: Path, name: str, repaired: str, ready: tuple[str, dict[str, Any]]) -> list[float]:
    """Seconds from each kill to the event ``repaired``. Before each kill, a new event ``ready`` is waited for."""
    seconds, since = [], 0.0
    for _ in range(_ROUNDS):
        _event(root, since, *ready)
        while not (pids := _pids(root, name)):
            time.sleep(0.1)
        since = time.time()
        os.kill(pids[0], signal.SIGKILL)
        seconds.append(_event(root, since, repaired, {})["time"] - since)
    return seconds


def _pids(root: Path, name: str) -> list[int]:
    return [int(pid) for pid, actor in json.loads((root / "pids.json").read_text()).items() if actor == name]


def _event(root: Path, since: float, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The first event of that kind. Errors: RuntimeError if none comes in time."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        for event in read_events(root):
            if event["time"] >= since and event["kind"] == kind and fields.items() <= event.items():
                return event
        time.sleep(0.05)
    raise RuntimeError(f"no {kind} within {_WAIT_SECONDS} s")
