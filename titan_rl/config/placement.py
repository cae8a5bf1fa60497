"""``[placement]``: which GPUs do what. On a CPU nothing of it holds."""

from dataclasses import dataclass, field
from typing import Literal

from titan_rl.config.kinds import Whole


@dataclass(kw_only=True)
class PlacementConfig:
    mode: Literal["disaggregated"] = "disaggregated"
    """Trainer and generators work side by side, on GPUs of their own; all on the same one where there is one."""
    trainer: list[Whole] = field(default_factory=list)
    """GPUs, by their number on each host; empty: the first that nobody else names. Lists may name the same one."""
    generator: list[Whole] = field(default_factory=list)
    """The same of the engines; and so for roles with ``placement = "own"``."""
    reference: list[Whole] = field(default_factory=list)
    teacher: list[Whole] = field(default_factory=list)
    critic: list[Whole] = field(default_factory=list)
    implicit_reward: list[Whole] = field(default_factory=list)
