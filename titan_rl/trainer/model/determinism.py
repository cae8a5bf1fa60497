"""Bitwise reproducibility of a repeated step, and its settings on a GPU (``[debug] deterministic``).

A CPU adds up in one order. A GPU's libraries and kernels do so only where they are asked to: gradients of gathered rows
and of attention are added up in the order in which threads arrive, cuBLAS shares work memory among streams, and a
tuner takes whatever was fastest by the clock.
"""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from titan_rl.compat.torch.compiling import set_compiler_determinism

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.titan_config import TitanConfig

_WORKSPACE = ":4096:8"
"""Of cuBLAS: eight buffers of 4 MiB for each stream; torch refuses to multiply without one of the two fixed sizes."""
_TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""By what the trainer computes in: how far a repeated step may be off where additions have no fixed order."""


def set_determinism(enabled: bool, device: torch.device) -> None:
    """Set deterministic algorithms, before the first product on a GPU; no effect on a CPU.

    An operation that has no deterministic form then raises RuntimeError, which names it. torch's own switch makes
    attention add up in one order, too, and rules out the forms that cannot.
    """
    if device.type == "cpu":
        return
    if enabled:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACE
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False
    # what is given out uninitialized is never read here: filling it would cost a pass and find nothing
    # (a checker does not see the attribute: torch makes it by replacing the module's class)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    set_compiler_determinism(enabled)  # compiled kernels are chosen by the clock, too


@dataclass(frozen=True)
class RankPlatform:
    """Device, determinism and torch version of a trainer rank."""

    device: str
    """``cpu``, or a GPU's name."""
    deterministic: bool = False
    torch: str = ""
    """Its version."""

    @property
    def repeats(self) -> bool:
        """Whether a repeated step is bitwise equal."""
        return self.device == "cpu" or self.deterministic


class RankSettings(Protocol):
    """Settings and device of a trainer rank."""

    @property
    def titan(self) -> "TitanConfig": ...

    @property
    def device(self) -> torch.device: ...


def rank_platform(learner: RankSettings) -> RankPlatform:
    """Platform of a rank's learner; the controller reads it by ``examine`` (actors/trainer.py)."""
    name = "cpu" if learner.device.type == "cpu" else torch.cuda.get_device_name(learner.device)
    return RankPlatform(name, learner.titan.debug.deterministic, torch.__version__)


def tolerance(places: list[RankPlatform], dtype: str) -> float:
    """Relative tolerance between results of one step on several platforms; 0: bitwise equal.

    ``dtype``: ``training.mixed_precision_param``. Two kinds of device are two orders of addition.
    """
    if all(place.repeats for place in places) and len({place.device for place in places}) <= 1:
        return 0.0
    return _TOLERANCES[dtype]


def is_equal(new: float | None, old: float | None, within: float, of_order: float = 0.0) -> bool:
    """Whether two measurements agree; None or NaN equals only itself.

    ``within``: relative tolerance; ``of_order``: smallest magnitude that it is relative to, for values that may cancel
    (losses: 1)."""
    if new is None or old is None:
        return new is old
    if math.isnan(new) or math.isnan(old):
        return math.isnan(new) and math.isnan(old)
    return new == old or abs(new - old) <= within * max(of_order, abs(old))
