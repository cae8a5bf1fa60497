"""DAPO: GRPO with a higher upper clip, a token mean, group filtering and length shaping.

Here is the bound; ``aggregation = "token"`` is every algorithm's default; dynamic sampling and the penalty for overlong
answers belong to the batch and to the reward, and are settings of those.

Source: arXiv 2503.14476, equation 8.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from titan_rl.algorithms.policy_gradient.grpo import GRPO


class DAPO(GRPO):
    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        clip_high: Annotated[float, Field(gt=0, le=1e6)] = 0.28
        """The ratio is clipped above 1 + clip_high."""
