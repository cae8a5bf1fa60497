"""Base class of algorithms: advantages, loss, needs. Trainer and controller know none by name.

A new one is a subclass of ``Algorithm`` in a file of its own (grpo.py shows all of it), entered in registry.py or named
``pkg.module:name`` in a TOML.

Dimensions: S trained tokens of a row, N samples of it, M numbers of each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from titan_rl.data.types import Rollout


@dataclass(frozen=True)
class LossInputs:
    """Columns of one row, float [S] each, or [S, K] of K words a token; None: not needed."""

    logprob_S: torch.Tensor
    """Under the model as it is; the gradient flows through it. Zeros where the model's head gives values."""
    sampling_logprob_S: torch.Tensor
    """As the generator reported it."""
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    """Of each token in the loss, all normalization included; 0: the token fills up a row and counts for nothing."""
    entropy_S: torch.Tensor
    """Of the distribution that predicted each token; detached, unless ``Needs.entropy_gradient``."""
    offsets_N: torch.Tensor | None = None
    """int64 [N + 1], from 0 to S: sample n of the row, a whole rollout with all its branches, has the tokens
    [offsets_N[n], offsets_N[n + 1]). No sample is split over rows: of one whose branches lie in several, all tokens
    stand together in one of their own, and weigh 0 where they lie (trainer/objective/whole_rollouts.py). None where
    ``is_token_sum`` has the loss of a part of a row computed."""
    branch_offsets: torch.Tensor | None = None
    """Where advantages are refined, the same of the samples' branches, which do not see each other; None: each sample
    is one."""
    reference_logprob_S: torch.Tensor | None = None
    """Under the frozen reference model."""
    proximal_logprob_S: torch.Tensor | None = None
    """Under the trainer's weights as they were before this step's first update."""
    value_S: torch.Tensor | None = None
    """The critic's value of the state that each token was written in, before this step's first update. Where the model
    that learns has itself a head for values: its own, and the gradient flows through them."""
    teacher_logprob_S: torch.Tensor | None = None
    """Under the teacher."""
    word_logprob_SK: torch.Tensor | None = None
    """Of the teacher's likeliest words, under the model as it is; the gradient flows through it. Without a value where
    advantages are refined."""
    teacher_word_logprob_SK: torch.Tensor | None = None
    """Of the same words, under the teacher."""
    teacher_mask_S: torch.Tensor | None = None
    """1 where the self-teacher was given another sample's right answer, else 0."""
    task_S: torch.Tensor | None = None
    """int64, of a mixture whose tasks have teachers: the number of each token's task in ``Algorithm.tasks``."""
    process_reward_S: torch.Tensor | None = None
    """The implicit reward of each token, before this step's first update of the policy."""
    group_sums_NM: torch.Tensor | None = None
    """Float64 [N, M], where advantages are refined: what ``group_terms`` gave, summed up over the sample's group."""

    @property
    def returns_offsets(self) -> torch.Tensor:
        """Offsets within which token rewards are summed: those of branches, or of samples."""
        return provided(self.offsets_N) if self.branch_offsets is None else self.branch_offsets


@dataclass(frozen=True)
class Refined:
    """Refined advantages and returns of one row, float [S] each."""

    advantage_S: torch.Tensor
    return_S: torch.Tensor | None = None
    """Returns that the critic learns to predict."""


@dataclass(frozen=True)
class Needs:
    """Requirements of an algorithm besides the policy and one reward a sample."""

    reference: bool = False
    critic: bool = False
    implicit_reward: bool = False
    """Model beside the policy, trained on outcomes, that rewards each token; requires the reference."""
    reward_model: bool = False
    teacher: bool = False
    self_teacher: Literal["", "policy", "initial"] = ""
    """The policy itself, with another sample's right answer in its prompt: before the step's first update, or as it
    was at first, which is the reference. Empty: none."""
    teacher_words: int = 0
    """Number of the teacher's most likely words at each token, with the model's own log-probabilities of them."""
    proximal: bool = False
    """Log-probabilities under the weights before the step's first update."""
    entropy_gradient: bool = False
    """The loss has a gradient for the entropies too, which costs the head's backward two more passes."""
    rewards: Literal["sample", "turn", "token"] = "sample"
    """Unit of a reward."""


NO_NEEDS = Needs()

Advantages = Sequence[float | np.ndarray] | np.ndarray
"""One of each rollout: a number for all its tokens, or an array [num_model_tokens]."""


def provided(column: torch.Tensor | None) -> torch.Tensor:
    """Column of ``LossInputs`` that the algorithm's needs guarantee."""
    assert column is not None, "a column that the algorithm's needs do not name"
    return column


@dataclass(kw_only=True)
class NoSettings:
    """Settings of an algorithm without TOML keys."""


class Algorithm(ABC):
    """Base class of algorithms.

    A subclass may set ``needs``, ``rewards`` and ``is_token_sum`` in its ``__init__`` by its settings."""

    Settings: ClassVar[type] = NoSettings
    """A keyword-only dataclass of the algorithm's own keys in ``[algorithm]``, which are checked strictly."""
    trains_on: ClassVar[Literal["rollouts", "demonstrations", "pairs", "labels"]] = "rollouts"
    """Kind of training data: sampled rollouts, or records of a file (algorithms/registry.py)."""
    rewards: Literal["any", "not_negative", "unused"] = "any"
    """Rewards that advantages accept; ``unused``: rewards are metrics only."""
    head: ClassVar[Literal["vocabulary", "value"]] = "vocabulary"
    """Last layer of the trained model."""
    needs: Needs = NO_NEEDS
    is_token_sum: bool = False
    """The loss is a sum over tokens of something of each token's log-probability, advantage and weight alone. The head
    may then take its gradient chunk by chunk, which saves the logits' second computation."""
    asks_of_whole_rollouts: bool = True
    """Whether the loss needs a sample's tokens together, such as their ratio; unused for token sums. Where a
    rollout's branches lie in several rows, that costs an update one more forward pass."""
    reprompt_template: str = ""
    """What a self-teacher reads, with ``{prompt}`` and ``{solution}`` (environments/rollout/reprompts.py)."""
    normalizes_batch: bool = False
    """Whether refined advantages are normalized to mean 0 and deviation 1, over all trained tokens of a step."""
    is_still_without_advantage: bool = True
    """Whether a row without advantages has no gradient: it then has no backward pass, and a batch of such rows no
    optimizer step."""

    implementation: Literal["reference", "triton"] = "reference"
    """Of the kernels that the loss calls: the learner sets what ``model.kernel`` means on its device."""

    tasks: Sequence[str] = ()
    """Names of a mixture's tasks where there is a teacher, which the learner sets: a metric ``NAME/TASK`` is divided by
    the number of the task's trained tokens."""

    def __init__(self, settings: Any = None):
        """``settings``: a ``Settings``; None: its defaults."""
        self.settings = self.Settings() if settings is None else settings

    @property
    def needs_whole_rollouts(self) -> bool:
        """Whether the loss of a token depends on others of its rollout."""
        return self.asks_of_whole_rollouts and not self.is_token_sum

    @abstractmethod
    def advantages(self, rollouts: list[Rollout]) -> Advantages:
        """Advantages of a group's usable rollouts: a number each, or an array [num_model_tokens] over its tokens."""

    def group_terms(self, inputs: LossInputs) -> torch.Tensor:
        """Terms [N, M] of each sample of a row, whose sums over the group ``refine`` uses.

        Called as ``refine`` is, and before it, where a subclass has it.

        A group's samples may lie in several rows and on several ranks; one collective a step adds them up, the same
        sums coming out wherever they lie. A sample that has a number here that is not finite has no part in them.
        """
        raise NotImplementedError

    @property
    def refines(self) -> bool:
        """Whether ``refine`` changes advantages; it is not called otherwise."""
        return type(self).refine is not Algorithm.refine

    def refine(self, inputs: LossInputs) -> Refined:
        """Final advantages, from those of ``advantages`` (rewards at tokens, say) and the columns of roles.

        A function of one row, without a gradient: it is called before the step's first update, with ``logprob_S`` and
        ``entropy_S`` empty."""
        return Refined(inputs.advantage_S)

    @abstractmethod
    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a row, and metric sums; tokens of weight 0 have no part in either.

        The loss, a scalar, is a sum weighted by ``weight_S``: it adds up over rows and ranks as it is. The dict holds
        scalars, each a sum over the trained tokens (where ``weight_S > 0``); they reach the metrics as means over the
        step's trained tokens, by the same names, which must not depend on the inputs.
        """
