"""``compile.enable`` on rows of ever other lengths: that steps go on, how far losses are off, and what it saves."""

from typing import Any

from gpu_check.fixtures import DirectTrainer, House
from gpu_check.sizes import Shape
from titan_rl.config.load import ConfigError
from titan_rl.data.types import Row

_STEPS = 8


def check(house: House) -> dict[str, Any]:
    batches = [house.rows("135m", Shape(8, 8, 100 + 17 * i, 200 + 29 * i, 8192), seed=i) for i in range(_STEPS)]
    losses, seconds = {}, {}
    for enabled in (False, True):
        try:
            trainer = house.trainer("135m", house.config(compile={"enable": enabled}))
        except ConfigError as error:  # as on a CPU
            return {"why_not": str(error)}
        seconds[enabled], losses[enabled] = zip(*(_step(house, trainer, rows) for rows in batches), strict=True)
        house.clear()
    off = (abs(one - other) for one, other in zip(losses[True], losses[False], strict=True))
    return {
        "steps": len(losses[True]),
        "loss_error": max(off),
        "seconds_each": seconds[True],
        "seconds_each_plain": seconds[False],
    }


def _step(house: House, trainer: DirectTrainer, rows: list[Row]) -> tuple[float, float]:
    """Seconds and loss."""
    metrics = []
    return house.bench.once(lambda: metrics.append(house.step(trainer, rows))), metrics[0].loss
