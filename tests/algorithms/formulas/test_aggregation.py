"""From a group's rewards to a step's loss: the aggregations of the field by hand, whatever rows the samples fell into.

A model's log-probability of a token is here a function of the token alone, so no model is needed.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import titan_rl.models.device  # isort: skip  # noqa: F401  (before any other torchtitan module)

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.batches.batching import checked_advantages
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.types import Provenance, Rollout, Row, Sample
from titan_rl.trainer.objective.nonfinite import _nonfinite_samples
from titan_rl.trainer.objective.objective import loss_inputs
from titan_rl.trainer.objective.preparation import with_advantages

LENGTHS = (4, 1, 2, 6, 3, 1)
"""Tokens that the model wrote, of two groups of three samples behind prompts of two tokens."""
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.5, 2.0)
MAX_NEW = 8
LAYOUTS = [(1, 100, True), (1, 100, False), (2, 16, True), (3, 9, False), (1, 9, True)]
"""Ranks, tokens of a row, and whether prompts are shared."""


def logprob_of(tokens: np.ndarray) -> np.ndarray:
    return -0.2 - 0.03 * tokens


def reference_of(tokens: np.ndarray) -> np.ndarray:
    return logprob_of(tokens) + 0.5 * np.sin(tokens)


def groups() -> list[list[Rollout]]:
    rng, rollouts = np.random.default_rng(5), []
    for sample, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        group = sample // 3
        tokens = np.concatenate([[group, group + 1], rng.integers(10, 60, length)]).astype(np.int32)
        provenance = np.array([Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * length, np.int8)
        logprobs = (logprob_of(tokens) + 0.3 * rng.normal(size=len(tokens))).astype(np.float32)
        rollouts.append(Rollout(f"p{group}", sample, tokens, provenance, logprobs, tokens, [], "ok", reward))
    return [rollouts[:3], rollouts[3:]]


def packed(algorithm, aggregation: str, layout) -> list[Row]:
    num_ranks, row_tokens, share_prefix = layout
    samples = [
        [
            Sample(r.tokens, r.provenance, r.logprobs, advantage, r.prompt_id, r.sample)
            for r, advantage in zip(group, checked_advantages(algorithm, group), strict=True)
        ]
        for group in groups()
    ]
    weigh = {"weigh": lambda s: token_weights(s, aggregation, MAX_NEW)}
    batch = pack(samples, num_ranks=num_ranks, row_tokens=row_tokens, share_prefix=share_prefix, **weigh)
    return [row for rows in batch.rows for row in rows]


def columns_of(row: Row) -> dict[str, torch.Tensor]:
    arrays = {name: getattr(row, name) for name in ("logprob_S", "advantage_S", "weight_S", "offsets_N")}
    arrays["reference_logprob_S"] = reference_of(row.target_S)
    columns = {name: torch.tensor(array) for name, array in arrays.items()}
    return {name: x if name == "offsets_N" else x.double() for name, x in columns.items()}


def inputs_of(algorithm, row: Row) -> LossInputs:
    logprob_S = torch.tensor(logprob_of(row.target_S), dtype=torch.float64)
    columns = columns_of(row)
    return loss_inputs(algorithm, torch.stack((logprob_S, 0 * logprob_S)), columns, columns["offsets_N"])


def prepared(algorithm, rows: list[Row], columns_of=columns_of) -> list[Row]:
    model = SimpleNamespace(columns=columns_of, device=torch.device("cpu"))
    [rows] = with_advantages(algorithm, [rows], model, sees=True, is_counted=True)
    return rows


def total_loss(name: str, options: dict, aggregation: str, layout) -> float:
    algorithm = ALGORITHMS[name](ALGORITHMS[name].Settings(**options))
    rows = prepared(algorithm, packed(algorithm, aggregation, layout))
    return float(sum(algorithm.loss(inputs_of(algorithm, row))[0] for row in rows))


def by_hand(advantages: list[np.ndarray], aggregation: str, beta: float = 0.0) -> float:
    """PPO's loss and k3 of each token; then the mean over all tokens (DAPO), the mean over samples of their means
    (GRPO), or the mean over samples of their sums over the longest length that there could be (Dr.GRPO)."""
    losses = []
    for rollout, advantage in zip([r for group in groups() for r in group], advantages, strict=True):
        answer = rollout.tokens[2:]
        ratio = np.exp(logprob_of(answer) - rollout.logprobs[2:].astype(np.float64))
        x = reference_of(answer) - logprob_of(answer)
        surrogate = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2))
        losses.append(surrogate + beta * (np.exp(x) - 1 - x))
    if aggregation == "token":
        return float(np.concatenate(losses).mean())
    each = [loss.mean() if aggregation == "sequence" else loss.sum() / MAX_NEW for loss in losses]
    return float(np.mean(each))


@pytest.fixture(scope="module")
def alone():
    """A process group of this process, over which advantages are normalized."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


AGGREGATIONS = pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


@AGGREGATIONS
@LAYOUT
def test_grpo_with_a_divergence(aggregation, layout):
    rewards = np.array(REWARDS).reshape(2, 3)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    expected = by_hand(list(advantages.ravel()), aggregation, beta=0.2)
    assert total_loss("grpo", {"kl_coefficient": 0.2}, aggregation, layout) == pytest.approx(expected, rel=1e-6)


@LAYOUT
def test_gspo_is_the_mean_over_samples_of_their_own_loss(layout):
    """Equation 5 of the paper, with bounds that some samples reach."""
    rewards, losses = np.array(REWARDS).reshape(2, 3), []
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    for rollout, advantage in zip([r for group in groups() for r in group], advantages.ravel(), strict=True):
        log_ratio = logprob_of(rollout.tokens[2:]) - rollout.logprobs[2:].astype(np.float64)
        ratio = np.exp(log_ratio.sum() / len(log_ratio))
        losses.append(-min(ratio * advantage, np.clip(ratio, 0.95, 1.05) * advantage))
    found = total_loss("gspo", {"clip_low": 0.05, "clip_high": 0.05}, "sequence", layout)
    assert found == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@AGGREGATIONS
@LAYOUT
def test_reinforce_pp_is_normalized_over_all_tokens(alone, layout, aggregation, beta, baseline):
    """verl's masked_whiten: (A - mean) / sqrt(variance over N - 1, plus 1e-8), of all tokens of the batch."""
    rewards, to_go = np.array(REWARDS).reshape(2, 3), []
    rewards = rewards - rewards.mean(1, keepdims=True) if baseline else rewards
    for rollout, reward in zip([r for group in groups() for r in group], rewards.ravel(), strict=True):
        answer = rollout.tokens[2:]
        kl = rollout.logprobs[2:].astype(np.float64) - reference_of(answer)
        at_tokens = -beta * kl
        at_tokens[-1] += reward
        to_go.append(np.cumsum(at_tokens[::-1])[::-1])
    every = np.concatenate(to_go)
    deviation = np.sqrt(np.var(every, ddof=1) + 1e-8)
    expected = by_hand([(a - every.mean()) / deviation for a in to_go], aggregation)
    options = {"baseline": baseline}
    options |= {"kl_coefficient": beta, "kl_in": "reward", "kl_estimator": "k1"} if beta else {}
    assert total_loss("reinforce_pp", options, aggregation, layout) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_who_is_at_fault_is_named_alone(alone, value):
    """Of whom the reference knows no number: normalization over the batch makes nobody else's advantage one, too."""
    options = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    algorithm = ALGORITHMS["reinforce_pp"](ALGORITHMS["reinforce_pp"].Settings(**options))
    [row] = packed(algorithm, "token", (1, 100, True))
    reference_S = reference_of(row.target_S)
    third = slice(*row.offsets_N[2:4])
    reference_S[third.start] = value
    row = replace(row, role_columns={"reference_logprob_S": reference_S.astype(np.float32)})
    [row] = prepared(algorithm, [row], lambda row: columns_of(row) | {"reference_logprob_S": torch.tensor(reference_S)})
    assert np.flatnonzero(~np.isfinite(row.advantage_S)).tolist() == list(range(third.start, third.stop))
    seen = {0: torch.zeros(2, len(row.target_S))}
    learner = SimpleNamespace(statistics=seen, loss_of=lambda *_: 0.0, gives="logprob", samples_per_loss=1)
    prompt_id, sample, _ = row.owners[2]
    assert _nonfinite_samples(learner, [row]) == {(prompt_id, sample): "reference logprob"}
