"""PRIME: each token is rewarded by a model that learns, beside the policy, nothing but the outcomes of whole answers.

    r_t = beta (log phi(y_t) - log ref(y_t))                                           the implicit process reward
    A_t = process_weight sum_{s >= t} discount^(s - t) (r_s - mean_{j != i} mean_s r_s^j)
        + (the reward less the mean reward of the group's others)

phi is ``[implicit_reward]`` (its loss is in arithmetic/implicit_rewards.py, its steps in
trainer/roles/learned/implicit_reward.py), the reference ``[reference]``. Advantages are whitened over the whole step,
and go into the loss that algorithms without a critic share. The outcome that phi learns is what was verified, from 0
to 1.

phi learns a step's rollouts before it rewards them (the paper's double forward, and the default of the published
implementation, verl's recipe/prime), or after that (single forward, the default of the paper's own runs):
``implicit_reward.update``. That implementation differs from the paper, and from this, in three things: its baseline
is G / (G - 1) r_t - sum_j mean_j / (G - 1), so the token's own reward counts in it; the last token gets no process
reward; and process rewards are divided by the largest of their sums over a batch. It whitens, of which the paper says
nothing; ``whiten = false`` is the equation as it stands.

Source: arXiv 2502.01456, algorithm 1 and equations 3 to 6. Prompts are chosen by [filter] min_pass_rate and
max_pass_rate (online prompt filtering; 0.2 and 0.8 there).

Dimensions: S trained tokens of a row, N samples.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import leave_one_out, rewards_of
from titan_rl.algorithms.arithmetic.implicit_rewards import leave_one_out_rewards, means_of_samples
from titan_rl.algorithms.base import LossInputs, Refined, provided
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class PRIME(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        process_weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
        """Of the process rewards in the advantage; that of the outcome counts 1."""
        discount: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Of a process reward, for every token that it comes later (gamma)."""
        whiten: bool = True
        """Bring a step's advantages to mean 0 and deviation 1."""

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.needs = replace(self.needs, reference=True, implicit_reward=True)
        self.normalizes_batch = self.settings.whiten
        self.is_still_without_advantage = False  # process rewards differ where outcomes do not

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        """Leave-one-out advantages of outcomes; ``refine`` adds the token rewards."""
        return leave_one_out(rewards_of(rollouts))

    def group_terms(self, inputs: LossInputs) -> torch.Tensor:
        return means_of_samples(provided(inputs.process_reward_S), inputs.weight_S, provided(inputs.offsets_N))

    def refine(self, inputs: LossInputs) -> Refined:
        relative_S = leave_one_out_rewards(
            provided(inputs.process_reward_S),
            self.group_terms(inputs),
            provided(inputs.group_sums_NM),
            provided(inputs.offsets_N),
        )
        process_S = self._to_go(inputs, relative_S, self.settings.discount)
        return Refined(super().refine(inputs).advantage_S + self.settings.process_weight * process_S)
