"""CISPO: REINFORCE whose importance weight is clipped, and is a constant: no token loses its gradient.

Source: arXiv 2506.13585, equations 4 and 5. A wide upper bound, 5 by default, is what ScaleRL, 2510.13786, found to do.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from titan_rl.algorithms.policy_gradient.grpo import GRPO


def _none(value: float | None) -> None:
    """Errors: ValueError for any number."""
    if value is not None:
        raise ValueError("Input should be None")


class CISPO(GRPO):
    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
        """The ratio is clipped below 1 - clip_low; 1: not at all, as in the paper."""
        clip_high: Annotated[float, Field(gt=0, le=1e6)] = 4.0
        """The ratio is clipped above 1 + clip_high."""
        dual_clip: Annotated[float | None, AfterValidator(_none)] = None
        """Has no meaning here: the ratio is bounded on both sides already."""

    kind = "cispo"
