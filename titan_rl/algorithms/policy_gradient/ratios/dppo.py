"""DPPO, divergence proximal policy optimization: a mask by divergence in the place of the clip.

    surrogate = M r A;    M = 0 where (A > 0 and r > 1, or A < 0 and r < 1) and D > threshold, else 1

D is the divergence of sampler and policy at the token, estimated by the sampled token's probabilities alone. A token is
masked where its update would lead further away; it then has no gradient. Any other has REINFORCE's, times its ratio.
So a rare token may become a hundred times as likely, where PPO stops it at 1 + clip_high, and a likely one may not
lose a fifth of all probability, where PPO lets it.

D and the directions are of the sampler's distribution, also with ``decoupled``: the paper found that a trust region
around a recomputed policy collapses (section 5.2), and warns of truncated importance, too (section 5.4).

Source: arXiv 2602.04879, equations 12 to 14 (the binary approximation). Thresholds by default are those of the
authors' runs; prime-rl and SkyRL have 0.2 for total variation, TRL 0.2 below and 0.28 above. verl and TRL also cut the
ratio (at 20 and 10), which the authors' runs turn off. Advantages are GRPO's.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.trust_region import binary_divergence, moves_away
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.policy_gradient.grpo import GRPO

_THRESHOLDS = {"tv": 0.15, "kl": 0.05}


class DPPO(GRPO):
    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        divergence: Literal["tv", "kl"] = "tv"
        """Total variation, or KL(sampler || policy), of the sampled token against all others."""
        threshold: Annotated[float, Field(gt=0, le=1e6)] | None = None
        """Divergence above which tokens are masked; None: 0.15 for tv, 0.05 for kl."""

        bounds: ClassVar[tuple[str, ...]] = ("dual_clip",)

        def __post_init__(self) -> None:
            """Errors: ValueError for settings that do not go together."""
            super().__post_init__()
            self.refuse(("clip_low", "clip_high"), "dppo clips no ratio: set threshold")
            if self.divergence == "tv" and self.threshold is not None and self.threshold >= 1:
                raise ValueError(f"threshold = {self.threshold} masks nothing: total variation is at most 1: lower it")

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.objective = replace(self.objective, clip_low=1.0, clip_high=math.inf)

    @property
    def threshold(self) -> float:
        s = self.settings
        return _THRESHOLDS[s.divergence] if s.threshold is None else s.threshold

    def _surrogate(
        self, inputs: LossInputs, importance_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        columns = inputs.logprob_S, inputs.sampling_logprob_S
        masked_S = moves_away(*columns, inputs.advantage_S)
        masked_S &= binary_divergence(*columns, self.settings.divergence) > self.threshold
        advantage_S = torch.where(masked_S, 0, inputs.advantage_S)
        loss, metrics = super()._surrogate(replace(inputs, advantage_S=advantage_S), importance_S)
        if self.settings.dual_clip is None:
            del metrics["clip_fraction"]
        return loss, {"masked_fraction": (masked_S & (inputs.weight_S > 0)).sum(), **metrics}
