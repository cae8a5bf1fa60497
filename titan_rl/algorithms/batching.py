"""Groups of rollouts become batches for the trainer: advantages, then rows. Pure."""

from typing import TYPE_CHECKING

import numpy as np

from titan_rl.algorithms.base import ALGORITHMS
from titan_rl.config.schema import AlgorithmConfig, Config, RolloutConfig
from titan_rl.data.packing import pack, token_weights
from titan_rl.data.types import Batch, Group, Rollout, Sample

if TYPE_CHECKING:  # it needs torchtitan
    from titan_rl.trainer.titan_config import TitanConfig


def usable_rollouts(group: Group, algorithm: AlgorithmConfig) -> list[Rollout]:
    """Those that may reach the loss: a timeout or a failure of the machinery never does."""
    allowed = {"ok", "truncated"} if algorithm.train_truncated else {"ok"}
    return [rollout for rollout in group.rollouts if rollout.status in allowed]


def discard_reason(group: Group, algorithm: AlgorithmConfig) -> str | None:
    """Why a group cannot be trained on, if it cannot: it takes two usable samples to compare."""
    if group.refused:
        return group.refused
    if len(usable_rollouts(group, algorithm)) >= 2:
        return None
    statuses = [rollout.status for rollout in group.rollouts]
    return max(("infra_error", "timeout", "truncated"), key=statuses.count)


def sample_outcomes(group: Group, algorithm: AlgorithmConfig, num_samples: int) -> list[str | None]:
    """Of each sample, by its number: None if it may be trained on, or why it is discarded (``ledger.Outcomes``)."""
    if group.refused:
        return [group.refused] * num_samples
    statuses = {rollout.sample: rollout.status for rollout in group.rollouts}
    usable = {rollout.sample for rollout in usable_rollouts(group, algorithm)}
    alone = "no_peers" if discard_reason(group, algorithm) else None
    return [alone if sample in usable else statuses.get(sample, "infra_error") for sample in range(num_samples)]


def _samples(rollouts: list[Rollout], algorithm: AlgorithmConfig) -> list[Sample]:
    rewards_G = np.array([rollout.reward for rollout in rollouts], np.float64)
    advantages_G = ALGORITHMS[algorithm.name].advantages(rewards_G, algorithm.normalize_std)
    return [
        Sample(
            rollout.tokens, rollout.provenance, rollout.logprobs, float(advantage), rollout.prompt_id, rollout.sample
        )
        for rollout, advantage in zip(rollouts, advantages_G, strict=True)
    ]


def update_parts(groups: list[Group], algorithm: AlgorithmConfig) -> list[list[Group]]:
    """The groups of each optimizer step that a batch is split into."""
    parts = np.array_split(np.arange(len(groups)), algorithm.updates_per_batch)
    return [[groups[index] for index in part] for part in parts]


def build_batches(
    groups: list[Group],
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    *,
    num_ranks: int,
    row_tokens: int,
    row_multiple: int = 1,
) -> list[Batch]:
    """One batch for each optimizer step; each is normalized by its own count of trained tokens."""
    return [
        pack(
            [_samples(usable_rollouts(group, algorithm), algorithm) for group in part],
            num_ranks=num_ranks,
            row_tokens=row_tokens,
            row_multiple=row_multiple,
            share_prefix=rollout.share_prefix,
            weigh=lambda samples: token_weights(samples, algorithm.aggregation, rollout.max_new_tokens),
        )
        for part in update_parts(groups, algorithm)
    ]


def demonstration_batches(
    rollouts: list[Rollout], examples_per_step: int, *, num_ranks: int, row_tokens: int, row_multiple: int = 1
) -> list[Batch]:
    """One batch for each supervised step, every example alike. Errors: ValueError if one is longer than a row."""
    longest = max(len(rollout.tokens) for rollout in rollouts)
    if longest > row_tokens:
        raise ValueError(f"a demonstration has {longest} tokens: raise training.seq_len, which is {row_tokens}")
    groups = [[Sample(r.tokens, r.provenance, r.logprobs, 1.0, r.prompt_id, r.sample)] for r in rollouts]
    return [
        pack(
            groups[begin : begin + examples_per_step],
            num_ranks=num_ranks,
            row_tokens=row_tokens,
            row_multiple=row_multiple,
            share_prefix=False,
            weigh=lambda samples: token_weights(samples, "token", 1),
        )
        for begin in range(0, len(groups), examples_per_step)
    ]


def step_batches(groups: list[Group], config: Config, titan: "TitanConfig") -> list[Batch]:
    """A step's batches, as the trainer's layout takes them."""
    return build_batches(groups, config.algorithm, config.rollout, **_layout(titan))


def warm_up_batches(rollouts: list[Rollout], config: Config, titan: "TitanConfig") -> list[Batch]:
    return demonstration_batches(rollouts, config.sft.examples_per_step, **_layout(titan))


def _layout(titan: "TitanConfig") -> dict[str, int]:
    return dict(num_ranks=titan.batch_degree, row_tokens=titan.training.seq_len, row_multiple=titan.row_multiple)
