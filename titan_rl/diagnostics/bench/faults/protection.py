"""What it costs a run that meets no fault to be ready for one: ledger, snapshots in memory, asynchronous checkpoints.

One run of the tiny model, whose steps are so short that every fixed cost shows, is protected and not, in turn, a block
of steps at a time, and neighbours are compared: the machine's own speed changes from minute to minute by more than the
cost. A protected block has a snapshot a step and one checkpoint. The ledger cannot be left out of a run, so its part
is measured by itself and added.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import load_config
from titan_rl.controller.session import Session
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.train_for_bench import trained
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.train import drive

_BAR_COST = 5.0
_BLOCK, _PAIRS = 25, 20
_PROMPTS, _SAMPLES = 16, 8
_FIXED = {
    "training": {"steps": _BLOCK * (2 * _PAIRS + 1)},
    "rollout": {"prompts_per_step": _PROMPTS, "group_size": _SAMPLES, "max_staleness": 0},
    "eval": {"prompts": 16, "every": 0},
    "recovery": {"standby": False, "snapshot_every": 1},
}
_SECONDS_FILE = "block_seconds.json"


async def _train_in_turn(session: Session) -> None:
    """Writes down what each block of steps took; the first one does not count."""
    seconds = []
    async with session:
        for block in range(2 * _PAIRS + 1):
            start = time.perf_counter()
            protected = _is_protected(block)
            session.config.recovery.snapshot_every = int(protected)
            session.config.checkpoint.every = int(protected)
            await session.step()
            session.config.checkpoint.every = 0
            await session.step(_BLOCK - 1)
            seconds.append(time.perf_counter() - start)
        (session.run_dir.root / _SECONDS_FILE).write_text(json.dumps(seconds[1:]))


def _is_protected(block: int) -> bool:
    """The first of a pair or the second, in turn: what grows in the course of a run must not favour one side."""
    pair, second = divmod(block - 1, 2)
    return bool(second) != bool(pair % 2)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    with trained("quickstart", _FIXED, overrides, ("titan_rl.diagnostics.bench.faults.protection",)) as root:
        blocks = json.loads((root / _SECONDS_FILE).read_text())
    steps = {protected: [] for protected in (False, True)}
    for index, seconds in enumerate(blocks):
        steps[_is_protected(index + 1)].append(seconds / _BLOCK)
    ledger, bare = _ledger_seconds(), statistics.median(steps[False])
    costs = [100 * (on - off + ledger) / (bare - ledger) for off, on in zip(*steps.values(), strict=True)]
    quartiles = statistics.quantiles(costs)
    return [
        row("protection in a fault-free run", quartiles[1], "% of a step", _BAR_COST, quartiles=quartiles),
        row("step without snapshots and checkpoints", bare, "s"),
        row(f"step with a snapshot, and a checkpoint every {_BLOCK} steps", statistics.median(steps[True]), "s"),
        row("ledger", 1000 * ledger, "ms a step"),
    ]


def _ledger_seconds() -> float:
    """Of a step: its prompts are issued, settled, and the account is checked."""
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        ledger, seconds = Ledger(Path(folder) / "ledger.db"), []
        for step in range(1, 151):
            prompts = [f"{step:06d}-{prompt:03d}" for prompt in range(_PROMPTS)]
            start = time.perf_counter()
            ledger.issue(prompts, _SAMPLES)
            ledger.settle({prompt: [None] * _SAMPLES for prompt in prompts}, step)
            ledger.check(0)
            seconds.append(time.perf_counter() - start)
        ledger.close()
    return statistics.median(seconds)


def main(config_file: str, arguments: list[str]) -> int:
    """Entry point of the bench's own process."""
    drive(_train_in_turn(Session.open(load_config(config_file, parse_overrides(arguments)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
