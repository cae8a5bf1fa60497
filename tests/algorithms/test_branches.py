"""A rollout counts once, whatever number of conversations (branches) its tokens are in: by hand, in any rows.

A model's log-probability of a token is here a function of the token and of one parameter, so no model is needed.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import titan_rl.models.device  # isort: skip  # noqa: F401  (before any other torchtitan module)

from titan_rl.algorithms.arithmetic.off_policy import ratio_of, rejected
from titan_rl.algorithms.batches.batching import discard_reason, sample_outcomes, step_batches
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.sections.schema import AlgorithmConfig, Config, RolloutConfig
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Row, Sample, Turn
from titan_rl.models.layers.penalties import penalized_tokens
from titan_rl.records.metrics import sampling_metrics
from titan_rl.trainer.objective.objective import loss_and_sums
from titan_rl.trainer.objective.preparation import with_advantages
from titan_rl.trainer.objective.whole_rollouts import joined_loss

NUM_NEW = 8
ROW_TOKENS = (6, 9, 200)
"""So few that each branch has a row of its own, some, and so many that there is one row."""
LAYOUTS = pytest.mark.parametrize("row_tokens", ROW_TOKENS)


def rollout_of(sample: int, lengths: list[int], reward: float, prompt: str = "p") -> Rollout:
    """A conversation for each length, of two tokens of a prompt and of so many of the model's."""
    rng, ids, wrote, turns, branches = np.random.default_rng([sample, *lengths]), [], [], [], []
    for length in lengths:
        branches.append(len(ids))
        ids += [3, 4 + len(branches), *rng.integers(10, 60, length)]
        wrote += [Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * length
        turns += [Turn(len(ids) - length, len(ids), "stop")] if length else []
    tokens, provenance = np.array(ids, np.int32), np.array(wrote, np.int8)
    noise = np.where(provenance == Provenance.MODEL, 0.1 * rng.normal(size=len(ids)), 0)
    logprobs = (logprob_of(torch.tensor(tokens), torch.tensor(1.0)).numpy() + noise).astype(np.float32)
    versions = np.where(provenance == Provenance.MODEL, 0, -1).astype(np.int32)
    starts = branches if len(branches) > 1 else []
    return Rollout(prompt, sample, tokens, provenance, logprobs, versions, turns, "ok", reward, branches=starts)


def logprob_of(tokens: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return -0.2 - 0.03 * parameter * tokens


GROUP = Group("p", [rollout_of(0, [2, 4, 3], 1.0), rollout_of(1, [4], 0.0), rollout_of(2, [1, 1], 0.25)])


def batch_of(algorithm, aggregation="token", group=GROUP, row_tokens=200, share_prefix=True) -> list[Row]:
    rollout = RolloutConfig(max_new_tokens=NUM_NEW, share_prefix=share_prefix)
    config = Config(algorithm=AlgorithmConfig(aggregation=aggregation), rollout=rollout)
    [batch] = step_batches([group], algorithm, config, Layout(1, row_tokens))
    return batch.rows[0]


def model_of(parameter: torch.Tensor, **found) -> SimpleNamespace:
    """``found``: columns of each row, as functions of its tokens."""

    def columns(row: Row) -> dict[str, torch.Tensor]:
        arrays = {name: getattr(row, name) for name in ("logprob_S", "advantage_S", "weight_S", "offsets_N")}
        arrays |= {name: of(row.target_S).astype(np.float32) for name, of in found.items()} | row.role_columns
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def statistics(row: Row) -> torch.Tensor:
        logprob_S = logprob_of(torch.from_numpy(row.target_S), parameter)
        return torch.stack((logprob_S, torch.zeros_like(logprob_S)))

    def measure(rows: list[Row], asked) -> list[torch.Tensor]:
        return [statistics(row).detach() for row in rows]

    return SimpleNamespace(columns=columns, statistics=statistics, measure=measure, device=torch.device("cpu"))


def prepared(algorithm, rows: list[Row], **found) -> list[Row]:
    model = model_of(torch.tensor(1.0), **found)
    [rows] = with_advantages(algorithm, [rows], model, sees=True, is_counted=True)
    return rows


def loss_and_slope(algorithm, rows: list[Row]) -> tuple[float, float]:
    """As trainer/step/learner.py has it: what is asked of whole rollouts, and then row by row."""
    parameter = torch.tensor(1.0, requires_grad=True)
    model = model_of(parameter)
    joined = joined_loss(model, rows, partial(loss_and_sums, algorithm), is_counted=True)
    total = float(joined.sums.get("loss", 0.0))

    def loss_of(statistics, index, columns):
        nonlocal total
        loss, sums = loss_and_sums(algorithm, statistics, columns)
        total += float(sums["loss"])
        return loss

    for index, row in enumerate(joined.rows):
        joined.added_to(loss_of)(model.statistics(row), index, model.columns(row)).backward()
    return total, float(parameter.grad)


def by_owner(rows: list[Row], values) -> dict[int, np.ndarray]:
    """A column of each rollout, put together from all rows; ``values``: its name, or what it is of a row."""
    found: dict[int, list] = {}
    for row in rows:
        column = getattr(row, values) if isinstance(values, str) else values(row)
        for (_, sample, count), begin in zip(row.owners, row.branch_offsets, strict=False):
            found.setdefault(sample, []).append(column[begin : begin + count])
    return {sample: np.concatenate(parts) for sample, parts in found.items()}


# weights


@pytest.mark.parametrize("share_prefix", [True, False])
@LAYOUTS
def test_a_rollout_weighs_the_same_whatever_it_became(row_tokens, share_prefix):
    algorithm, packing = ALGORITHMS["grpo"](), dict(row_tokens=row_tokens, share_prefix=share_prefix)
    counts = {0: 9, 1: 4, 2: 2}
    for aggregation, wanted in (
        ("sequence", dict.fromkeys(counts, 1 / 3)),
        ("constant", {sample: count / (3 * NUM_NEW) for sample, count in counts.items()}),
        ("token", {sample: count / 15 for sample, count in counts.items()}),
    ):
        weights = by_owner(batch_of(algorithm, aggregation, **packing), "weight_S")
        assert {sample: weight_S.sum() for sample, weight_S in weights.items()} == pytest.approx(wanted)
        assert all(np.ptp(weight_S) == 0 for weight_S in weights.values())


def test_branches_of_a_sibling_change_nobodys_weight():
    for aggregation in ("sequence", "constant"):
        one, four = (
            batch_of(
                ALGORITHMS["grpo"](), aggregation, Group("p", [rollout_of(0, lengths, 1.0), rollout_of(1, [4], 0)])
            )
            for lengths in ([4], [1, 1, 1, 1])
        )
        assert [by_owner(rows, "weight_S")[1].sum() for rows in (one, four)] == pytest.approx(
            [0.5 if aggregation == "sequence" else 4 / (2 * NUM_NEW)] * 2
        )


# rewards of tokens


@LAYOUTS
@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_each_branch_ends_in_the_reward(row_tokens, name):
    rewards = by_owner(batch_of(ALGORITHMS[name](), row_tokens=row_tokens), "advantage_S")
    assert sorted(rewards[0].nonzero()[0].tolist()) and rewards[0].sum() == 3
    assert {sample: sorted(set(values.tolist())) for sample, values in rewards.items()} == {
        0: [0, 1],
        1: [0],
        2: [0.25],
    }


@LAYOUTS
def test_returns_of_every_branch_are_the_rewards(row_tokens):
    """Without whitening: REINFORCE++ of every token, and the returns of a critic that predicts 0."""
    algorithm = ALGORITHMS["reinforce_pp"]()
    algorithm.normalizes_batch = False
    returns = by_owner(prepared(algorithm, batch_of(algorithm, row_tokens=row_tokens)), "advantage_S")
    assert {sample: set(values.tolist()) for sample, values in returns.items()} == {0: {1}, 1: {0}, 2: {0.25}}
    algorithm = ALGORITHMS["ppo"](ALGORITHMS["ppo"].Settings(gae_lambda=1.0, whiten=False))
    rows = prepared(algorithm, batch_of(algorithm, row_tokens=row_tokens), value_S=lambda tokens: 0.0 * tokens)
    for column in ("advantage_S", lambda row: row.role_columns["return_S"]):
        assert {sample: set(v.tolist()) for sample, v in by_owner(rows, column).items()} == {0: {1}, 1: {0}, 2: {0.25}}


@LAYOUTS
def test_a_penalty_in_the_reward_is_that_of_the_branchs_own_tokens(row_tokens):
    """Of each token, what follows in its own conversation; the advantage is the rollout's."""
    options = {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    algorithm = ALGORITHMS["dr_grpo"](ALGORITHMS["dr_grpo"].Settings(**options))
    rows = prepared(
        algorithm, batch_of(algorithm, row_tokens=row_tokens), reference_logprob_S=lambda tokens: -0.05 * tokens
    )
    wanted = []
    for start, stop in GROUP.rollouts[0].spans:
        own = slice(start + 2, stop)
        kl = GROUP.rollouts[0].logprobs[own] + 0.05 * GROUP.rollouts[0].tokens[own]
        wanted.append(1.0 - np.mean([1.0, 0.0, 0.25]) - 0.5 * kl[::-1].cumsum()[::-1])
    found = [
        row.advantage_S[a:b].tolist()
        for row in rows
        for (_, sample, _), a, b in zip(row.owners, row.branch_offsets, row.branch_offsets[1:], strict=False)
        if sample == 0
    ]
    for part, of_branch in zip(sorted(found, key=len), sorted(wanted, key=len), strict=True):
        assert part == pytest.approx(of_branch.tolist(), abs=1e-5)


# ratios


def gspo_by_hand(low: float, high: float, parameter: torch.Tensor) -> torch.Tensor:
    """arXiv 2507.18071, equations 5 and 7, y being all that the model wrote of a rollout."""
    rewards, losses = np.array([rollout.reward for rollout in GROUP.rollouts]), []
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    for rollout, advantage in zip(GROUP.rollouts, advantages, strict=True):
        wrote = torch.from_numpy(rollout.provenance == Provenance.MODEL)
        log_ratio = logprob_of(torch.from_numpy(rollout.tokens), parameter) - torch.from_numpy(rollout.logprobs)
        ratio = log_ratio[wrote].mean().exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("token_gradient", [False, True])
@pytest.mark.parametrize("bound", [0.5, 1e-4])
@LAYOUTS
def test_gspo_has_one_ratio_for_a_rollout(row_tokens, bound, token_gradient):
    settings = ALGORITHMS["gspo"].Settings(clip_low=bound, clip_high=bound, token_gradient=token_gradient)
    algorithm = ALGORITHMS["gspo"](settings)
    parameter = torch.tensor(1.0, requires_grad=True)
    wanted = gspo_by_hand(bound, bound, parameter)
    [slope] = torch.autograd.grad(wanted, parameter)
    rows = batch_of(algorithm, "sequence", row_tokens=row_tokens)
    assert any(row.split for row in rows) == (row_tokens < 200)
    found = loss_and_slope(algorithm, rows)
    assert found == pytest.approx((float(wanted.detach()), float(slope)), rel=1e-4, abs=1e-6)


def test_corrections_are_of_the_whole_rollout():
    """Log-ratios of .1 and -.1 a token, by branch: of the whole rollout they are 0."""
    [row] = batch_of(ALGORITHMS["grpo"]())
    log_ratio_S = torch.zeros(len(row.target_S))
    first, second, third = (slice(*row.branch_offsets[n : n + 2]) for n in range(3))
    log_ratio_S[first], log_ratio_S[second], log_ratio_S[third] = 0.1, -0.1, 0.2 / 3
    weight_S, offsets_N = torch.from_numpy(row.weight_S), torch.from_numpy(row.offsets_N)
    for level in ("geometric", "sequence"):
        ratio_S = ratio_of(log_ratio_S, torch.zeros_like(log_ratio_S), weight_S, offsets_N, level)
        assert ratio_S.tolist() == pytest.approx([1.0] * len(ratio_S))
    ratio_S = ratio_of(log_ratio_S, torch.zeros_like(log_ratio_S), weight_S, offsets_N, "token")
    rejected_S = rejected(ratio_S, weight_S, offsets_N, 0.0, 1.1)
    assert by_owner([row], lambda row: rejected_S.numpy())[0].all() and rejected_S.sum() == 9


@LAYOUTS
@pytest.mark.parametrize("reject", ["geometric", "sequence", "worst_token"])
def test_who_is_rejected_does_not_depend_on_rows(row_tokens, reject):
    settings = ALGORITHMS["grpo"].Settings(reject=reject, reject_low=0.97, reject_high=1.2)
    algorithm = ALGORITHMS["grpo"](settings)
    wanted = loss_and_slope(algorithm, batch_of(algorithm, "sequence"))
    assert loss_and_slope(algorithm, batch_of(algorithm, "sequence", row_tokens=row_tokens)) == pytest.approx(wanted)
    assert wanted[0] != pytest.approx(loss_and_slope(ALGORITHMS["grpo"](), batch_of(algorithm, "sequence"))[0])


# PRIME


@LAYOUTS
def test_prime_learns_and_compares_a_rollout_once(row_tokens):
    """Outcomes weigh 1 / 3 for each rollout; the baseline is the mean of the other rollouts' mean rewards."""
    algorithm = ALGORITHMS["prime"](ALGORITHMS["prime"].Settings(whiten=False, discount=1.0, process_weight=1.0))
    rows = batch_of(algorithm, row_tokens=row_tokens)
    outcomes = by_owner(rows, lambda row: row.role_columns["outcome_weight_S"])
    assert {sample: weight_S.sum() for sample, weight_S in outcomes.items()} == pytest.approx(
        dict.fromkeys(range(3), 1 / 3)
    )
    found = by_owner(prepared(algorithm, rows, process_reward_S=lambda tokens: 0.01 * tokens), "advantage_S")
    wrote = [rollout.tokens[rollout.provenance == Provenance.MODEL] for rollout in GROUP.rollouts]
    means, rewards = [0.01 * tokens.mean() for tokens in wrote], [1.0, 0.0, 0.25]
    for sample, rollout in enumerate(GROUP.rollouts):
        others = [number for number in range(3) if number != sample]
        baseline, outcome = (np.mean([of[number] for number in others]) for of in (means, rewards))
        wanted = []
        for start, stop in rollout.spans:
            own = 0.01 * rollout.tokens[start + 2 : stop] - baseline
            wanted += (own[::-1].cumsum()[::-1] + rewards[sample] - outcome).tolist()
        assert sorted(found[sample].tolist()) == pytest.approx(sorted(wanted), abs=1e-5)


# nothing written


EMPTY = Group("p", [*GROUP.rollouts, rollout_of(3, [0], 0.5), rollout_of(4, [0, 0], 0.5)])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_rollout_without_a_token_counts_nowhere(aggregation):
    algorithm = ALGORITHMS["grpo"]()
    [with_it], [without] = batch_of(algorithm, aggregation, EMPTY), batch_of(algorithm, aggregation)
    for name in ("weight_S", "advantage_S", "target_S", "tokens_T"):
        assert np.array_equal(getattr(with_it, name), getattr(without, name)), name
    assert with_it.owners == without.owners
    assert sample_outcomes(EMPTY, AlgorithmConfig(), 5) == [None, None, None, "unasked", "unasked"]
    assert discard_reason(Group("p", EMPTY.rollouts[3:]), AlgorithmConfig()) == "unasked"
    assert np.isfinite(list(sampling_metrics([EMPTY], 0).values())).all()


@pytest.mark.parametrize("name", sorted(name for name, cls in ALGORITHMS.items() if cls.trains_on == "rollouts"))
def test_no_algorithm_stumbles_over_it(name):
    algorithm = ALGORITHMS[name]()
    assert len(algorithm.advantages(EMPTY.rollouts)) == 5
    assert sum(len(row.owners) for row in batch_of(algorithm, group=EMPTY)) == 6
    nobody = batch_of(algorithm, group=Group("p", EMPTY.rollouts[3:]))
    algorithm.normalizes_batch = False
    names = ("value_S", "process_reward_S", "teacher_logprob_S", "teacher_mask_S")
    zeros = dict.fromkeys(names, lambda tokens: 0.0 * tokens)
    for row in prepared(algorithm, nobody, **zeros):
        assert not row.owners and not row.weight_S.any() and np.isfinite(row.advantage_S).all()


def test_an_empty_sample_changes_no_weight_and_is_in_no_row():
    """Also of a loop of one's own, which packs by itself."""

    def sample(number: int, length: int, branch: int = 0) -> Sample:
        provenance = np.array([0, *[1] * length], np.int8)
        return Sample(
            np.arange(3, 4 + length), provenance, np.zeros(length + 1, np.float32), 1.0, "p", number, None, branch
        )

    three, none = sample(0, 3), sample(1, 0)
    assert token_weights([three, none], "sequence", 1)[0] == pytest.approx(1 / 3)
    assert token_weights([three, none], "constant", 6)[0] == pytest.approx(1 / 6)
    assert token_weights([none], "sequence", 1) == [1.0]
    group = [three, sample(1, 0), sample(1, 2, 1), sample(1, 0, 2)]  # whose first and last branch are empty
    batch = pack(
        [group, [none]], num_ranks=1, row_tokens=64, share_prefix=True, weigh=lambda s: token_weights(s, "sequence", 1)
    )
    [row] = batch.rows[0]
    assert row.owners == [("p", 0, 3), ("p", 1, 2)] and row.offsets_N.tolist() == [0, 3, 5]
    assert row.weight_S.tolist() == pytest.approx([1 / 6] * 3 + [1 / 4] * 2)


@pytest.mark.parametrize("share_prefix", [True, False])
@LAYOUTS
def test_each_branch_is_penalized_for_its_own_words(row_tokens, share_prefix):
    """And each of its answers from where it begins: two in the last conversation."""
    rollouts = [replace(rollout, penalties=Penalties(1.2)) for rollout in GROUP.rollouts]
    turns = [*rollouts[0].turns[:-1], Turn(12, 13, "stop"), Turn(13, 15, "stop")]
    rollouts[0] = replace(rollouts[0], turns=turns)
    rows = batch_of(ALGORITHMS["grpo"](), group=Group("p", rollouts), row_tokens=row_tokens, share_prefix=share_prefix)
    found = {}
    for row in rows:
        for (_, sample, _), (_, branch), penalized in zip(row.owners, row.rollouts, penalized_tokens(row), strict=True):
            found[sample, branch] = penalized
    assert found[0, 2].start_S.tolist() == [2, 3, 3] and found[0, 2].place_S.tolist() == [2, 3, 4]
    for rollout in rollouts:
        for branch, (start, stop) in enumerate(rollout.spans):
            assert np.array_equal(found[rollout.sample, branch].tokens_T, rollout.tokens[start : stop - 1])
    assert all(penalized.start_S[0] == 2 for penalized in found.values())
