"""What each row does: a function of the fixtures that gives figures, by the row's name in thresholds.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_check.checks import (
    attention,
    compiled,
    correctness,
    cuda_ipc,
    deterministic,
    kernels,
    publish,
    rejoin,
    snapshots,
    train,
)
from gpu_check.fixtures import Fixtures

Checks = dict[str, Callable[[Fixtures], dict[str, Any]]]
CHECKS: Checks = {
    "deterministic": deterministic.check,
    "correctness": correctness.check,
    **{
        f"train {size} {dtype}": partial(train.check, size=size, dtype=dtype)
        for size in ("135m", "1b")
        for dtype in ("float32", "bfloat16")
    },
    "train 1b compiled": partial(train.check, size="1b", dtype="bfloat16", compiles=True),
    **{f"kernel {name}": check for name, check in kernels.CHECKS.items()},
    "attention": attention.check,
    "compiled": compiled.check,
    "snapshots": snapshots.check,
    "publish": publish.check,
    "rejoin": rejoin.check,
    "cuda ipc": cuda_ipc.check,
}
