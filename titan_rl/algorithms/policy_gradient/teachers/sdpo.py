"""SDPO: self-distillation from the policy itself, which has read another sample's right answer.

    top_k = 0: A_t = (1 - w) A_t^GRPO + w (log q(y_t) - log p(y_t)),   w = distillation_weight
    top_k = k: distillation's divergence over the teacher's k likeliest words and one bin for the rest

p is the policy at the prompt, q the teacher at ``reprompt_template``, which holds the prompt and an answer of the same
group that is right: the policy as it was before the step's first update, or as it was at first (``self_teacher``). y is
the sample's own answer in both. A sample in whose group no other one is right has no teacher, and learns from A^GRPO
alone. Rewards decide which answers are right, and count besides for A^GRPO.

The paper keeps its teacher near the first policy, as a moving average or in a trust region. Feedback of an environment
beside the answer is not there.

Source: arXiv 2601.20802, section 3.

Dimensions: S trained tokens of a row.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import group_relative, rewards_of
from titan_rl.algorithms.base import Advantages, LossInputs, Refined, provided
from titan_rl.algorithms.policy_gradient.base import PolicyGradient
from titan_rl.algorithms.policy_gradient.teachers.distillation import Distillation, DistillationSettings
from titan_rl.data.types import Rollout

_PLACES = ("prompt", "solution")
_TEMPLATE = "{prompt}\n\nThis is a correct solution:\n\n{solution}\n\nNow solve the original question yourself."


class SDPO(Distillation):
    @dataclass(kw_only=True)
    class Settings(DistillationSettings):
        distillation_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Of the teacher in an advantage, beside GRPO's."""
        self_teacher: Literal["policy", "initial"] = "policy"
        """The policy before the step's first update, or as it was at first, which stays what it is."""
        reprompt_template: str = _TEMPLATE
        """What the teacher reads in the place of the last message of the prompt: ``{prompt}`` is that one's text,
        ``{solution}`` the right answer."""

        of_all_forms: ClassVar[tuple[str, ...]] = (
            *DistillationSettings.of_all_forms,
            "reprompt_template",
            "self_teacher",
        )

        def __post_init__(self) -> None:
            """Errors: ValueError for settings that do not go together."""
            super().__post_init__()
            if missing := [place for place in _PLACES if f"{{{place}}}" not in self.reprompt_template]:
                raise ValueError(f"reprompt_template has no {{{missing[0]}}}: add it")

    settings: Settings
    rewards = "any"

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        teacher = self.settings.self_teacher
        reference = self.needs.reference or teacher == "initial"
        self.needs = replace(self.needs, teacher=False, self_teacher=teacher, reference=reference)
        self.reprompt_template = self.settings.reprompt_template
        if self.settings.distillation_weight == 1:
            self.rewards = "unused"

    def advantages(self, rollouts: list[Rollout]) -> Advantages:
        rewards_G = rewards_of(rollouts)
        return 0.0 * rewards_G if self.settings.distillation_weight == 1 else group_relative(rewards_G, True)

    def refine(self, inputs: LossInputs) -> Refined:
        if self.settings.top_k:
            return Refined(inputs.advantage_S)
        weight, has_teacher_S = self.settings.distillation_weight, provided(inputs.teacher_mask_S) > 0
        reward_S = provided(inputs.teacher_logprob_S) - self._old_logprob(inputs)
        told_S = self._to_go(inputs, torch.where(has_teacher_S, reward_S, 0), self.settings.discount)
        advantage_S = (1 - weight) * inputs.advantage_S + weight * told_S
        return PolicyGradient.refine(self, replace(inputs, advantage_S=advantage_S))

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        has_teacher_S = provided(inputs.teacher_mask_S) > 0
        teacher_S = torch.where(has_teacher_S, provided(inputs.teacher_logprob_S), inputs.logprob_S.detach())
        weight_S = torch.where(has_teacher_S, inputs.weight_S, 0) if self.settings.top_k else inputs.weight_S
        loss, metrics = super().loss(replace(inputs, teacher_logprob_S=teacher_S, weight_S=weight_S))
        return loss, metrics | {"teacher_fraction": (has_teacher_S & (inputs.weight_S > 0)).sum()}
