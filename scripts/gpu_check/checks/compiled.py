"""``compile.enable`` on rows of ever other lengths: that steps go on, how far losses are off, and what it saves."""

from typing import Any

from gpu_check.fixtures import DirectTrainer, Fixtures
from gpu_check.sizes import Shape
from titan_rl.config.load import ConfigError
from titan_rl.data.types import Row

_STEPS = 8


def check(fixtures: Fixtures) -> dict[str, Any]:
    batches = [fixtures.rows("135m", Shape(8, 8, 100 + 17 * i, 200 + 29 * i, 8192), seed=i) for i in range(_STEPS)]
    losses, seconds = {}, {}
    for enabled in (False, True):
        try:
            trainer = fixtures.trainer("135m", fixtures.config(compile={"enable": enabled}))
        except ConfigError as error:  # as on a CPU
            return {"why_not": str(error)}
        seconds[enabled], losses[enabled] = zip(*(_step(fixtures, trainer, rows) for rows in batches), strict=True)
        fixtures.clear()
    off = (abs(one - other) for one, other in zip(losses[True], losses[False], strict=True))
    return {
        "steps": len(losses[True]),
        "loss_error": max(off),
        "seconds_each": seconds[True],
        "seconds_each_plain": seconds[False],
    }


def _step(fixtures: Fixtures, trainer: DirectTrainer, rows: list[Row]) -> tuple[float, float]:
    """Seconds and loss."""
    metrics = []
    return fixtures.bench.once(lambda: metrics.append(fixtures.step(trainer, rows))), metrics[0].loss
