"""The most memory of a rank that joins anew, as after a peer's death: no time may see two models."""

from typing import Any

from gpu_check.bench import mib
from gpu_check.fixtures import Fixtures
from gpu_check.sizes import STEP


def check(fixtures: Fixtures) -> dict[str, Any]:
    bench, config = fixtures.bench, fixtures.config(recovery={"snapshot_every": 1})
    trainer = fixtures.trainer("1b", config)
    trainer.open_snapshots()
    fixtures.step(trainer, fixtures.rows("1b", STEP), snapshot=1)
    steps = trainer.snapshot_steps()
    bench.empty_cache()
    held = bench.held()
    peak = bench.peak(lambda: fixtures.join(trainer, config))
    joined = bench.once(lambda: trainer.restore(1, None))
    return {
        "peak_of_one": peak / held,
        "held_mib": mib(held),
        "peak_mib": mib(peak),
        "seconds_restore": joined,
        "restored": steps == [1] and trainer.snapshot_steps() == [1],
    }
