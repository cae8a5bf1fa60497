"""Steps of one trainer rank: what must not change a gradient, and what must come back from a checkpoint."""

import sys
import unittest.mock
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import FAULTS, VOCABULARY, batch_of, poison, spoil_a_weight, with_fault
from rank_processes import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check_model
from titan_rl.controller.recovery.nonfinite_batches import NonfiniteStreak
from titan_rl.data.batches.packing import fit_rows, pack
from titan_rl.data.nonfinite import Culprit, NonfiniteBatch
from titan_rl.data.types import Batch, StepMetrics
from titan_rl.kernels import linear_logprob
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers import decoder
from titan_rl.records.checkpoints.shard_store import ShardStore
from titan_rl.trainer.objective.objective import agreement_sums, loss_and_sums, with_agreement_before
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.snapshot import load_snapshot
from titan_rl.trainer.state.snapshot_kinds import make_snapshots
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


@pytest.fixture
def make_learner(model_path):
    def make(**optimizer) -> Learner:
        tables = {
            "optimizer": {"lr": 1e-3} | optimizer,
            "training": {"steps": 10},
            "lr_scheduler": {"decay_ratio": 1.0},
        }
        config = load_config(None, tables)
        return Learner(config, build_titan(config), model_path)

    return make


def train(learner: Learner, seed: int) -> StepMetrics:
    return learner.train(batch_of(seed).rows[0], True)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in learner.shards()}


def gradient(learner: Learner, batch: Batch) -> tuple[dict[str, float], torch.Tensor]:
    totals = learner.forward_backward(batch.rows[0])
    flat = torch.cat([p.grad.full_tensor().detach().flatten().clone() for p in learner.model_parts[0].parameters()])
    learner.optimizer.zero_grad()
    return {name: float(value) for name, value in totals.items()}, flat


def test_layout_changes_neither_loss_nor_gradient(make_learner):
    learner = make_learner()
    one_row = batch_of(0, row_tokens=1000, share_prefix=False)
    assert len(one_row.rows[0]) == 1
    totals, flat = gradient(learner, one_row)
    assert flat.norm() > 0
    for row_tokens in (20, 40, 1000):
        for share_prefix in (True, False):
            batch = batch_of(0, row_tokens=row_tokens, share_prefix=share_prefix)
            other_totals, other_flat = gradient(learner, batch)
            assert other_totals == pytest.approx(totals, rel=1e-5, abs=1e-6)
            assert (other_flat - flat).norm() < 1e-5 * flat.norm()


HEADS = {"tied": True, "untied": False}
TEMPERATURE = 0.7


def make_head_learner(path, **parallelism) -> Learner:
    config = load_config(None, {"rollout": {"temperature": TEMPERATURE}, "parallelism": parallelism})
    return Learner(config, build_titan(config), path)


@pytest.fixture(scope="module", params=HEADS)
def headed_model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_tiny(path, seed=1, hidden_size=64, num_layers=2, tie_word_embeddings=HEADS[request.param])
    return path


def logits_in_full(learner: Learner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of this rank's words; and the row's columns."""
    [row] = fit_rows(batch_of(0, row_tokens=1000).rows[0], token_multiple=2, row_multiple=1, same_length=False)
    columns = learner.policy.columns(row)
    keywords = learner.policy.keywords(row, columns)
    for name in ("target_S", "temperature", "implementation"):
        keywords.pop(name)
    return learner.model_parts[0](columns["tokens_T"][None], **keywords), columns


def with_logits_in_full(learner: Learner):
    """The same totals and gradient by all logits and torch's own distribution."""
    logits_SV, columns = logits_in_full(learner)
    assert logits_SV.shape == (len(columns["target_S"]), learner.spec.model.vocab_size)
    words = torch.distributions.Categorical(logits=logits_SV / TEMPERATURE)
    logprob_S, entropy_S = words.log_prob(columns["target_S"]), words.entropy().detach()
    loss, totals = loss_and_sums(learner.algorithm, torch.stack((logprob_S, entropy_S)), columns)
    loss.backward()
    return logprob_S.detach(), {name: float(value) for name, value in totals.items()}, take_gradients(learner)


def with_the_head(learner: Learner):
    with unittest.mock.patch.object(linear_logprob, "_backward_again") as again:  # the expected gradients came
        totals = learner.forward_backward(batch_of(0, row_tokens=1000).rows[0])
    assert not again.called
    return learner.statistics[0][0], {name: float(value) for name, value in totals.items()}, take_gradients(learner)


def take_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    named = learner.model_parts[0].named_parameters()
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in named}
    learner.optimizer.zero_grad()
    return gradients


def assert_same(found, wanted) -> None:
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in wanted[2].items():
        assert (found[2][name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_the_head_agrees_with_logits_in_full(headed_model):
    learner = make_head_learner(headed_model)
    assert_same(with_the_head(learner), with_logits_in_full(learner))


def head_rank(index: int, folder: str) -> None:
    """A rank of two tensor-parallel ones, which hold 50 words and 49."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=index, world_size=2)
    learner = make_head_learner(folder, tensor_parallel_degree=2)
    with torch.no_grad():
        logits_SV = logits_in_full(learner)[0]
    torch.save((with_the_head(learner), logits_SV), f"{folder}/{index}.pt")
    dist.destroy_process_group()


def test_the_head_agrees_with_logits_in_full_over_a_spread_vocabulary(headed_model):
    learner = make_head_learner(headed_model)
    assert learner.spec.model.vocab_size == 99
    run_ranks(head_rank, 2, str(headed_model))
    wanted = with_logits_in_full(learner)
    found, parts = zip(*(torch.load(headed_model / f"{index}.pt") for index in range(2)), strict=True)
    for rank in found:
        assert_same(rank, wanted)
    assert [part.shape[1] for part in parts] == [50, 49]
    torch.testing.assert_close(torch.cat(parts, 1), logits_in_full(learner)[0].detach())


COUPLED = """
from titan_rl.algorithms.base import Algorithm

class Coupled(Algorithm):
    def advantages(self, rollouts):
        return [rollout.reward for rollout in rollouts]

    def loss(self, inputs):
        total = (inputs.logprob_S * inputs.advantage_S * inputs.weight_S).sum()
        return -total - total**2, {"surprise": -(inputs.logprob_S * (inputs.weight_S > 0)).sum()}
"""
"""A loss in which tokens meet: no sum over tokens of something of each alone."""


def test_a_users_loss_that_is_no_token_sum_has_the_right_gradient_and_its_metric(headed_model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    module = f"coupled_{headed_model.name}"
    (tmp_path / f"{module}.py").write_text(COUPLED)
    algorithm, plugins = {"name": f"{module}:Coupled"}, {"plugin_path": [str(tmp_path)]}
    config = load_config(None, {"algorithm": algorithm, "run": plugins, "rollout": {"temperature": TEMPERATURE}})
    learner = Learner(config, build_titan(config), headed_model)
    with unittest.mock.patch.object(linear_logprob, "_forward_and_expected_backward") as expected:
        totals = learner.forward_backward(batch_of(0, row_tokens=1000).rows[0])
    assert not expected.called  # the head was told nothing that it would have to take back
    named = {name: float(value) for name, value in totals.items()}
    assert_same((learner.statistics[0][0], named, take_gradients(learner)), with_logits_in_full(learner))
    batch = batch_of(0)
    metrics = learner.train(batch.rows[0], True)
    assert metrics.loss_metrics.keys() == {"surprise"}
    again = sum(float(statistics_2S[0].sum()) for statistics_2S in learner.statistics.values())
    assert metrics.loss_metrics["surprise"] == pytest.approx(-again / batch.num_trained_tokens, rel=1e-5)


class Shapes(TorchDispatchMode):
    """Of all tensors that are made, for the backward or not."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.seen.add(tuple(out.shape))
        return out


def test_logits_in_full_never_exist(headed_model, monkeypatch):
    tiles = {"tile_tokens": 16, "tile_words": 40}
    monkeypatch.setattr(decoder, "linear_logprob", partial(decoder.linear_logprob, **tiles))
    learner = make_head_learner(headed_model)
    whole = len(batch_of(0, row_tokens=1000).rows[0][0].target_S), learner.spec.model.vocab_size
    for run, exist in ((with_logits_in_full, True), (with_the_head, False)):
        with Shapes() as shapes:
            run(learner)
        assert (whole in shapes.seen) == exist
    assert (16, 40) in shapes.seen


def test_triton_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr("titan_rl.models.device.DEVICE_TYPE", "cpu")
    for kernel in ("auto", "reference"):
        check_model(load_config(None, {"model": {"kernel": kernel}}))
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(None, {"model": {"kernel": "triton"}}))
    [line] = str(caught.value).splitlines()
    assert "model.kernel = 'triton'" in line and "leave it out" in line


def test_rows_that_only_keep_ranks_in_step_add_nothing(make_learner):
    learner = make_learner()
    rows = batch_of(0, row_tokens=1000).rows[0]
    [[dummy]] = pack([], num_ranks=1, row_tokens=8, share_prefix=True, weigh=lambda samples: []).rows
    totals, flat = gradient(learner, Batch([rows], 0, 0, True))
    with_dummy, flat_with_dummy = gradient(learner, Batch([[*rows, dummy]], 0, 0, True))
    assert with_dummy == totals and torch.equal(flat, flat_with_dummy)


def test_same_checkpoint_and_batch_give_the_same_bits(make_learner):
    one, two = ([train(learner, step) for step in range(2)] for learner in (make_learner(), make_learner()))
    for a, b in zip(one, two, strict=True):
        assert (a.loss, a.grad_norm, a.entropy) == (b.loss, b.grad_norm, b.entropy)
    assert one[0].loss != one[1].loss


def test_rows_without_advantages_have_no_backward_and_nothing_comes_out_otherwise(make_learner):
    learner, batch = make_learner(), batch_of(0, row_tokens=30)
    still = batch.rows[0][1::2]
    for row in still:
        row.advantage_S[:] = 0
    with unittest.mock.patch.object(learner.algorithm, "is_still_without_advantage", False):
        wanted = gradient(learner, batch)
    with unittest.mock.patch.object(torch.Tensor, "backward", autospec=True, side_effect=torch.Tensor.backward) as made:
        found = gradient(learner, batch)
    assert 0 < made.call_count == len(batch.rows[0]) - len(still)
    assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])


def test_batch_without_signal_moves_the_schedule_and_no_weight(make_learner):
    learner = make_learner()
    first = train(learner, 0)
    before = weights(learner)
    second = learner.train(batch_of(1, scale=0.0).rows[0], False)
    assert second.grad_norm == 0
    after = weights(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    third = train(learner, 2)
    assert first.learning_rate > second.learning_rate > third.learning_rate
    moved = weights(learner)
    assert all(not torch.equal(before[name], moved[name]) for name in before)


def test_metrics_are_means_over_trained_tokens(make_learner):
    batch = batch_of(0, row_tokens=20)
    metrics = make_learner().train(batch.rows[0], True)
    assert metrics.num_trained_tokens == batch.num_trained_tokens
    assert 0 < metrics.entropy <= np.log(VOCABULARY + 10)
    assert 0 <= metrics.loss_metrics["clip_fraction"] <= 1
    assert 1 < metrics.agreement_mean < metrics.agreement_max and metrics.kl_k3 > 0
    assert metrics.learning_rate == 1e-3


def test_sft_lowers_the_loss_and_leaves_optimizer_and_schedule_alone(make_learner):
    learner = make_learner()
    kept = learner.algorithm, learner.optimizer, learner.scheduler
    demonstrations = batch_of(0)
    for row in demonstrations.rows[0]:
        row.advantage_S[:] = 1
    losses = learner.sft([demonstrations.rows[0]] * 12, lr=1e-2)
    assert losses[-1] < losses[0] - 1
    assert (learner.algorithm, learner.optimizer, learner.scheduler) == kept
    assert train(learner, 0).learning_rate == 1e-3


def test_sft_in_calls_of_some_steps_each_ends_with_the_same_weights(make_learner):
    """Moments and schedule stay between them."""
    batches = [batch_of(seed).rows[0] for seed in range(4)]
    for row in chain(*batches):
        row.advantage_S[:] = 1
    whole, parts = make_learner(), make_learner()
    losses = whole.sft(batches, 1e-2)
    assert [loss for batch in batches for loss in parts.sft([batch], 1e-2, len(batches))] == losses
    pairs = zip(whole.shards(), parts.shards(), strict=True)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in pairs)


def test_agreement_by_hand():
    trainer, sampler = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, 0.0])
    sums = agreement_sums(trainer, sampler, torch.tensor([True, True, False]))
    e = np.exp
    assert float(sums["agreement_mean"]) == pytest.approx(e(0.5) + e(1))
    assert float(sums["agreement_max"]) == pytest.approx(e(1))
    assert float(sums["kl_k3"]) == pytest.approx((e(0.5) - 1 - 0.5) + (e(-1) - 1 + 1))


@pytest.mark.parametrize(
    ("moves", "decoupled", "measured"),
    [
        ((True, True), False, [(0,), (0,)]),
        ((False, True), False, [(0, 1), (0, 1)]),  # the first had no signal: both rows met the same policy
        ((True, True), True, [(0,), (1,)]),  # the proximal log-probabilities are of all rows
    ],
)
def test_agreement_of_an_update_leaves_out_what_the_step_moved(model_path, moves, decoupled, measured):
    options = {"decoupled": True, "importance": "token"} if decoupled else {}
    tables = {"algorithm": {"updates_per_batch": 2} | options, "optimizer": {"lr": 1e-2}}
    config = load_config(None, tables)

    def learner() -> Learner:
        return Learner(config, build_titan(config), model_path)

    rows = [batch_of(seed).rows[0] for seed in (0, 1)]
    before = [learner().train_step([each], [True])[0] for each in rows]
    for answer, updates in zip(learner().train_step(rows, list(moves)), measured, strict=True):
        wanted = [before[update] for update in updates]
        assert answer.agreement_mean == pytest.approx(np.mean([each.agreement_mean for each in wanted]), rel=1e-6)
        assert answer.agreement_max == pytest.approx(max(each.agreement_max for each in wanted), rel=1e-6)


def test_an_update_without_tokens_says_nothing_of_agreement():
    empty, first = StepMetrics(agreement_mean=0.0), StepMetrics(agreement_mean=1.25, num_trained_tokens=3)
    later = StepMetrics(agreement_mean=2.0, num_trained_tokens=3)
    answers = with_agreement_before([empty, first, later], [False, True, True])
    assert [answer.agreement_mean for answer in answers] == [1.25, 1.25, 1.25]


@pytest.mark.parametrize("copies", [True, False])
def test_checkpoint_gives_the_next_steps_back_bit_for_bit(make_learner, tmp_path, copies):
    learner = make_learner()
    for step in range(2):
        train(learner, step)
    saver = BackgroundSave(learner)
    learner.before_update = saver.wait_until_copied
    saver.begin(tmp_path / "checkpoint", copies=copies)
    saved = weights(learner)
    random_saved = torch.rand(3), np.random.rand()
    wanted = [train(learner, step) for step in (2, 3)]  # while it is being written
    saver.wait()

    resumed = make_learner()
    torch.rand(100), np.random.rand(100)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    loaded = weights(resumed)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert torch.equal(torch.rand(3), random_saved[0]) and np.random.rand() == random_saved[1]
    for step, metrics in zip((2, 3), wanted, strict=True):
        got = train(resumed, step)
        assert (got.loss, got.grad_norm) == (metrics.loss, metrics.grad_norm)
        assert got.learning_rate == metrics.learning_rate


def test_a_checkpoint_in_a_store_is_the_same(make_learner, tmp_path):
    learner = make_learner()
    train(learner, 0)
    saver, folder = BackgroundSave(learner), tmp_path / "checkpoint"
    folder.mkdir()
    saver.begin(folder, str(tmp_path / "store" / "run" / "1"))
    saver.wait()
    assert ShardStore(str(tmp_path / "store"), "run").gather("1", folder) == [folder]
    resumed = make_learner()
    resumed.load_checkpoint(folder)
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(learner).items())
    assert train(resumed, 1).loss == train(learner, 1).loss


def test_why_a_checkpoint_could_not_be_written_is_said(make_learner, tmp_path):
    saver = BackgroundSave(make_learner())
    (tmp_path / "checkpoint").write_text("a file in its place")
    saver.begin(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match=r"^rank 0: (FileExists|NotADirectory)Error: .*checkpoint"):
        saver.wait()


@pytest.mark.parametrize("by", ["checkpoint", "snapshot"])
def test_what_is_loaded_goes_on_under_the_settings_of_now_from_the_first_update_on(make_learner, tmp_path, by):
    learner = make_learner()
    train(learner, 0)
    other = make_learner(lr=5e-4, weight_decay=0.5)
    if by == "checkpoint":
        saver = BackgroundSave(learner)
        saver.begin(tmp_path / "checkpoint")
        saver.wait()
        other.load_checkpoint(tmp_path / "checkpoint")
    else:
        snapshots = make_snapshots(0, learner, learner.config)
        snapshots.take(1)
        assert snapshots.steps() == [1]
        load_snapshot(other, snapshots.slot_of(1))
    [group] = other.optimizer.optimizers[0].param_groups
    assert group["weight_decay"] == 0.5
    usual = train(learner, 1).learning_rate
    assert train(other, 1).learning_rate == pytest.approx(usual / 2) and usual < 1e-3, "its place in the schedule too"


def test_a_checkpoint_before_the_first_update_changes_nothing(make_learner, tmp_path):
    """torch's way to save an optimizer that has made no step makes one, which Adam counts."""
    saved, alone = make_learner(), make_learner()
    saver = BackgroundSave(saved)
    saver.begin(tmp_path / "checkpoint")
    saver.wait()
    resumed = make_learner()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for learner in (saved, alone, resumed):
        train(learner, 1)
    wanted = weights(alone)
    for learner in (saved, resumed):
        found = weights(learner)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def state(learner: Learner) -> dict:
    moments = {f"{name} {key}": value.clone() for name, key, value in _moments(learner)}
    return weights(learner) | moments


def _moments(learner):
    for optimizer in learner.optimizer.optimizers:
        for place, values in enumerate(optimizer.state.values()):
            for key, value in values.items():
                yield place, key, value


@pytest.mark.parametrize("row_tokens", [30, 1000])
@pytest.mark.parametrize("fault", FAULTS)
def test_nonfinite_values_name_the_sample_and_change_nothing(make_learner, fault, row_tokens):
    learner, other = make_learner(), make_learner()
    poison(learner)
    for one in (learner, other):
        train(one, 0)
    before = state(learner)
    if fault == "weights":
        name = spoil_a_weight(learner)
        before = state(learner)
    found = learner.train(with_fault(batch_of(1, row_tokens=row_tokens), fault, "p1", 2).rows[0], True)
    assert isinstance(found, NonfiniteBatch)
    after = state(learner)
    assert all(torch.equal(before[key].nan_to_num(7.0), after[key].nan_to_num(7.0)) for key in before)
    if fault == "weights":
        assert found.weights == [name] and name in str(found)
        return
    assert found.culprits == [Culprit("p1", 2, fault)] and f"{fault} of p1 sample 2" in str(found)
    assert found.weights == []
    # and the next step is the one that it would have been
    next_step, wanted = train(learner, 2), train(other, 2)
    assert (next_step.loss, next_step.grad_norm) == (wanted.loss, wanted.grad_norm)
    assert next_step.learning_rate == wanted.learning_rate


def test_all_bad_samples_are_named(make_learner):
    batch = batch_of(1)
    for prompt, sample in (("p0", 0), ("p2", 3)):
        with_fault(batch, "sampling logprob", prompt, sample)
    found = make_learner().train(batch.rows[0], True)
    assert [(c.prompt_id, c.sample) for c in found.culprits] == [("p0", 0), ("p2", 3)]


def test_an_infinite_log_probability_is_named_and_not_cut(make_learner):
    batch = batch_of(1)
    with_fault(batch, "sampling logprob", "p1", 2)
    for row in batch.rows[0]:
        row.logprob_S[np.isnan(row.logprob_S)] = -np.inf
    found = make_learner().train(batch.rows[0], True)
    assert found.culprits == [Culprit("p1", 2, "sampling logprob")]


def test_a_token_of_another_world_is_no_fault(make_learner):
    """Its ratio is cut; so is its gradient, and the step is that of the other tokens."""
    far, rest = batch_of(1), batch_of(1)
    place = next(int(index) for index, a in enumerate(far.rows[0][0].advantage_S) if a < 0)
    far.rows[0][0].logprob_S[place] = -1e4
    rest.rows[0][0].advantage_S[place] = 0
    found, wanted = (make_learner().train(batch.rows[0], True) for batch in (far, rest))
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6) and found.loss > 1e5


def test_nonfinite_values_end_sft_by_name(make_learner):
    batch = with_fault(batch_of(1), "loss", "p1", 2)
    for row in batch.rows[0]:
        row.advantage_S[:] = np.nan
    learner = make_learner()
    learner.sft([batch_of(0).rows[0]], lr=1e-3, num_steps=2)
    with pytest.raises(FloatingPointError, match="SFT step 2: .*p0 sample 0"):
        learner.sft([batch.rows[0]], lr=1e-3, num_steps=2)


def test_a_streak_of_nonfinite_batches_ends_only_with_a_step_that_is_new():
    streak = NonfiniteStreak()
    for event, step, length in (
        ("bad", 5, 1),
        ("good", 4, 1),  # done again after a return to 3
        ("bad", 5, 2),
        ("good", 5, 0),
        ("bad", 6, 1),
    ):
        getattr(streak, event)(step)
        assert streak.length == length
