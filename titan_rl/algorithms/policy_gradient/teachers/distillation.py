"""On-policy distillation: a student's own answers, and what a frozen teacher says of each of their tokens.

    top_k = 0: A_t = sum_{t' >= t} discount^(t' - t) (log q(y_t') - log p(y_t')), in a policy gradient's loss
    top_k = k: sum_S w sum_{b in B_t} p(b) log(p(b) / q(b)), differentiated as it stands

p is the student, q the teacher, B_t the teacher's k likeliest words at t and, as one more, all others together. The
first estimates the gradient of the reverse divergence from the sampled word alone (with discount 1 of whole answers,
with 0 of each token by itself); the second has no such noise. It is never above the divergence over all words, and is
that divergence where k is the whole vocabulary. Which words were sampled is taken as given, as in the source.

The task's reward is shown, and counts for nothing here. In a mixture each task may have a teacher of its own
(config/mixture.py): q is that of the token's own rollout.

Source: GKD, arXiv 2306.13649, section 3 (on-policy data alone, lambda = 1, and the reverse KL); of whole answers,
MiniLLM, arXiv 2306.08543, section 2; several teachers, MOPD, arXiv 2606.30406.

Dimensions: S trained tokens of a row, K words of the teacher's.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from titan_rl.algorithms.base import Advantages, LossInputs, Refined, provided
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


@dataclass(kw_only=True)
class DistillationSettings(PolicyGradientSettings):
    top_k: Annotated[int, Field(ge=0)] = 0
    """Words of the teacher's at each token; 0: the sampled word alone."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of what the teacher says of later tokens, for every token that they come later."""

    of_all_forms: ClassVar[tuple[str, ...]] = ("top_k",)
    """Keys that count with ``top_k``, too."""

    def __post_init__(self) -> None:
        """Errors: ValueError for settings that do not go together."""
        super().__post_init__()
        sampled = [f for f in fields(self) if f.name not in self.of_all_forms]
        idle = [f.name for f in sampled if getattr(self, f.name) != f.default]
        if self.top_k and idle:
            raise ValueError(f"{idle[0]} has no effect with top_k > 0, whose gradient is exact: leave it out")


class Distillation(PolicyGradient):
    Settings = DistillationSettings
    rewards = "unused"

    def __init__(self, settings: DistillationSettings | None = None):
        super().__init__(settings)
        top_k = self.settings.top_k
        self.needs = replace(self.needs, teacher=True, teacher_words=top_k)
        self.is_token_sum = self.is_token_sum and not top_k
        self.is_still_without_advantage = False

    def advantages(self, rollouts: list[Rollout]) -> Advantages:
        """Zeros; ``refine`` adds the teacher's part."""
        return [0.0] * len(rollouts)

    def refine(self, inputs: LossInputs) -> Refined:
        s = self.settings
        if s.top_k:
            return Refined(inputs.advantage_S)
        rewards_S = provided(inputs.teacher_logprob_S) - self._old_logprob(inputs)
        if s.kl_in == "reward":
            rewards_S = rewards_S - self._penalty(inputs)
        return Refined(self._to_go(inputs, rewards_S, s.discount))

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.settings.top_k:
            words = provided(inputs.word_logprob_SK), provided(inputs.teacher_word_logprob_SK)
            counted_S = inputs.weight_S > 0
            # what counts for nothing may hold any number: two equal distributions stand in its place
            kl_S = binned_divergence(*(torch.where(counted_S[:, None], word_SK, 0) for word_SK in words))
            return (kl_S * inputs.weight_S).sum(), self._by_task(kl_S.detach(), inputs)
        loss, metrics = super().loss(inputs)
        kl_S = inputs.logprob_S.detach() - provided(inputs.teacher_logprob_S)
        return loss, metrics | self._by_task(torch.where(inputs.weight_S > 0, kl_S, 0), inputs)

    def _by_task(self, kl_S: torch.Tensor, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Sums of ``teacher_kl``, of all tokens and of each task's."""
        sums = {"teacher_kl": kl_S.sum()}
        for number, task in enumerate(self.tasks):
            sums[f"teacher_kl/{task}"] = kl_S[provided(inputs.task_S) == number].sum()
        return sums


def binned_divergence(logprob_SK: torch.Tensor, teacher_logprob_SK: torch.Tensor) -> torch.Tensor:
    """KL divergence [S] of distributions over K words and one bin for all others.

    What is left for the others is taken to be no less than a rounding error, of either.
    """
    words_SK = logprob_SK.exp() * (logprob_SK - teacher_logprob_SK)
    rest_S, teacher_rest_S = _rest(logprob_SK), _rest(teacher_logprob_SK)
    return words_SK.sum(-1) + rest_S * (rest_S.log() - teacher_rest_S.log())


def _rest(logprob_SK: torch.Tensor) -> torch.Tensor:
    return (1 - logprob_SK.exp().sum(-1)).clamp(min=torch.finfo(logprob_SK.dtype).eps)
