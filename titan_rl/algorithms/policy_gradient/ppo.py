"""PPO with a critic: generalized advantage estimates, by the values of a model that learns beside the policy.

    r_t = (the sample's reward at each branch's last token, 0 before) - kl_coefficient KL_t   (with kl_in = "reward")
    A, R = generalized advantages of r and of the critic's values;   A is whitened over the whole step

The policy's loss is PPO's, with all that algorithms without a critic have too (base.py); the critic learns R
by the loss in values.py, as [critic] says. Values, A and R are of the models as they were before a step's first update.

Source: arXiv 1707.06347; rewards of tokens as in InstructGPT, arXiv 2203.02155.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import at_last_token, rewards_of
from titan_rl.algorithms.arithmetic.values import generalized_advantages
from titan_rl.algorithms.base import LossInputs, Refined, provided
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class PPO(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        discount: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Of what follows, for every token that it comes later (gamma)."""
        gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
        """How far advantages look ahead: 0 to the next token's value, 1 to the sample's end."""
        critic_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
        """The same for the returns that the critic learns (VC-PPO, arXiv 2503.01491: 1); None: gae_lambda."""
        whiten: bool = True
        """Bring a step's advantages to mean 0 and deviation 1."""

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.needs = replace(self.needs, critic=True)
        self.normalizes_batch = self.settings.whiten
        self.is_still_without_advantage = False  # equal rewards are no reason not to differ from the critic's values

    def advantages(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """Token rewards, from which ``refine`` computes advantages."""
        return at_last_token(rewards_of(rollouts), rollouts)

    def refine(self, inputs: LossInputs) -> Refined:
        rewards_S, s = inputs.advantage_S, self.settings
        if s.kl_in == "reward":
            rewards_S = rewards_S - self._penalty(inputs)
        columns = rewards_S, provided(inputs.value_S), inputs.returns_offsets, s.discount
        advantage_S, return_S = generalized_advantages(*columns, s.gae_lambda, implementation=self.implementation)
        if s.critic_lambda is not None:
            return_S = generalized_advantages(*columns, s.critic_lambda, implementation=self.implementation)[1]
        return Refined(advantage_S, return_S)
