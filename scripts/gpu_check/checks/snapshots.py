"""What a snapshot after each step takes of a step: the state of 1B parameters to the host, beside the next forward."""

import statistics
from typing import Any

from gpu_check.fixtures import Fixtures
from gpu_check.sizes import LONG_STEP


def check(fixtures: Fixtures) -> dict[str, Any]:
    trainer = fixtures.trainer(
        "1b", fixtures.config(recovery={"snapshot_every": 1}, activation_checkpoint={"mode": "full"})
    )
    trainer.open_snapshots()
    rows, bench = fixtures.rows("1b", LONG_STEP), fixtures.bench
    for _ in range(2):
        fixtures.step(trainer, rows)
    plain, with_snapshot, step = [], [], 0
    for _ in range(1 if fixtures.rehearse else 3):  # in turn, so that a clock that drifts is in both
        plain.append(bench.once(lambda: fixtures.step(trainer, rows)))
        # the first begins a copy, which is beside the second, which begins one, too
        for _ in range(2):
            step += 1
            with_snapshot.append(bench.once(lambda step=step: fixtures.step(trainer, rows, snapshot=step)))
        trainer.snapshots.steps()  # waits until it is whole
    begun, beside = with_snapshot[::2], with_snapshot[1::2]
    alone = bench.once(lambda: (trainer.take_snapshot(step + 1), trainer.snapshots.steps()))
    nbytes = trainer.snapshots.region.slot_bytes
    return {
        "share_of_step": statistics.median(beside) / statistics.median(plain) - 1,
        "seconds": statistics.median(plain),
        "seconds_that_begins": statistics.median(begun),
        "seconds_beside": statistics.median(beside),
        "seconds_alone": alone,
        "gib": nbytes / 2**30,
        "gb_per_second": nbytes / alone / 1e9,
        "whole": len(trainer.snapshots.steps()),
    }
