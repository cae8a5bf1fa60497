"""SAPO: a soft gate in the place of the clip, fading gradients out as ratios leave 1.

    surrogate = 4 / tau sigmoid(tau (r - 1)) A;    tau = tau_positive where A > 0, tau_negative elsewhere

The gradient of a token is 4 sigmoid (1 - sigmoid) r A times that of its log-probability: with r = 1 that of every
policy gradient. The paper's loss is the mean over samples of each one's: ``aggregation = "sequence"``.

Source: arXiv 2511.20347, equations 5 and 6; advantages are GRPO's.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.trust_region import soft_gate
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.policy_gradient.base import CLIP_KEYS
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.kernels.policy_loss import bounded_log_ratio


class SAPO(GRPO):
    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        tau_positive: Annotated[float, Field(gt=0, le=1e3)] = 1.0
        """Temperature of the gate where the advantage is positive: the higher, the sooner gradients fade."""
        tau_negative: Annotated[float, Field(gt=0, le=1e3)] = 1.05
        """The same where it is not; higher, since what lowers one token raises many that were never sampled."""

        bounds: ClassVar[tuple[str, ...]] = ("tau_positive", "tau_negative")

        def __post_init__(self) -> None:
            """Errors: ValueError for settings that do not go together."""
            super().__post_init__()
            self.refuse(CLIP_KEYS, "sapo clips no ratio: set tau_positive and tau_negative")

    def _surrogate(
        self, inputs: LossInputs, importance_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nothing_S = torch.zeros_like(inputs.advantage_S)
        loss, metrics = super()._surrogate(replace(inputs, advantage_S=nothing_S), importance_S)  # the divergence
        counted_S = inputs.weight_S > 0
        log_ratio_S = torch.where(counted_S, inputs.logprob_S, 0) - torch.where(counted_S, self._old_logprob(inputs), 0)
        advantage_S = torch.where(counted_S, inputs.advantage_S, 0).detach()
        tau_S = torch.where(advantage_S > 0, self.settings.tau_positive, self.settings.tau_negative)
        gated_S, slope_S = soft_gate(bounded_log_ratio(log_ratio_S).exp(), tau_S.to(log_ratio_S.dtype))
        gain_S = gated_S * advantage_S
        if importance_S is not None:
            gain_S = gain_S * torch.where(counted_S, importance_S, 0)
        del metrics["clip_fraction"]
        return loss - (gain_S * inputs.weight_S).sum(), {"gate_slope": (slope_S * counted_S).sum(), **metrics}
