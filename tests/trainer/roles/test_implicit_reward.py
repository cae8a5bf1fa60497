"""A model that learns outcomes beside the policy: what it computes and when; both are kept and taken back together."""

import math
import shutil

import numpy as np
import pytest
import torch
from batches import batch_of, with_fault
from mistakes import assert_one_line
from transformers import AutoModelForCausalLM

from titan_rl.config.load import ConfigError, flat, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.controller.preflight.resume import first_change
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Row, StepMetrics
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.snapshot import load_snapshot
from titan_rl.trainer.state.snapshot_kinds import make_snapshots
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

MODEL = {"beta": 0.5, "optimizer": {"lr": 1e-3}}
UPDATES = pytest.mark.parametrize("update", ["before", "after"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def learner_of(model, *, algorithm: dict = {}, lora: dict = {}, **settings) -> Learner:  # noqa: B006 (never changed)
    tables = {
        "lora": lora,
        "algorithm": {"name": "prime"} | algorithm,
        "implicit_reward": MODEL | settings,
        "optimizer": {"lr": 1e-3},
        "training": {"steps": 10},
    }
    config = load_config(None, tables)
    return Learner(config, build_titan(config), model)


def rows_of(*seeds: int) -> list[list[Row]]:
    return [batch_of(seed, with_outcomes=True).rows[0] for seed in seeds]


def step(learner: Learner, *seeds: int) -> list[StepMetrics | NonfiniteBatch]:
    return learner.train_step(rows_of(*seeds), [True] * len(seeds))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.weights()}


def same(before: dict, after: dict) -> bool:
    return all(torch.equal(before[name], after[name]) for name in before)


def ours(weights: dict) -> dict[str, torch.Tensor]:
    """The implicit reward model's."""
    return {name: tensor for name, tensor in weights.items() if name.startswith("implicit_reward.")}


def state(learner: Learner) -> tuple[list[torch.Tensor], int, float]:
    """Weights and moments, the schedule's place, and the rate that it came to."""
    role = learner.learned
    [optimizer] = role.optimizer.optimizers
    rate = optimizer.param_groups[0]["lr"]
    return [t.clone() for t in role._state()], role.scheduler.schedulers[0].last_epoch, rate


def same_state(one: tuple, other: tuple) -> bool:
    return one[1:] == other[1:] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def numbers(metrics: StepMetrics) -> tuple:
    return metrics.loss, metrics.grad_norm, metrics.loss_metrics


@UPDATES
def test_it_learns_outcomes_beside_the_policy_and_comes_to_tell_them(model, update):
    learner = learner_of(model, update=update)
    before = weights(learner)
    told = [step(learner, 0)[0].loss_metrics for _ in range(10)]
    after = weights(learner)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert told[0]["implicit_reward_loss"] == pytest.approx(math.log(2)) and told[0]["implicit_reward_mean"] == 0
    assert told[-1]["implicit_reward_loss"] < 0.4 and told[-1]["implicit_reward_accuracy"] == 1
    assert told[-1]["implicit_reward_mean"] != 0 and told[0]["implicit_reward_grad_norm"] > 0
    assert told[0]["implicit_reward_learning_rate"] == 1e-3


@UPDATES
def test_tokens_are_rewarded_by_the_weights_of_after_or_of_before_its_update(model, update):
    """All updates of a step are made first, or none is."""
    learner, spied = learner_of(model, update=update, algorithm={"whiten": False}), []
    step(learner, 3)
    learned, train = learner.learned, learner.train
    learner.train = lambda rows, *rest: (spied.append(rows), train(rows, *rest))[1]
    before = ours(weights(learner))
    wanted_before = learned.find(learner._compared(rows_of(7))[0])
    learner.train_step(rows_of(7, 8), [True, True])
    wanted_after = learned.find(learner._compared(rows_of(7))[0])
    assert not same(before, ours(weights(learner)))
    for row, old, new in zip(spied[0], wanted_before, wanted_after, strict=True):
        wanted, other = (new, old) if update == "before" else (old, new)
        assert np.array_equal(row.role_columns["process_reward_S"], wanted["process_reward_S"])
        assert not np.array_equal(row.role_columns["process_reward_S"], other["process_reward_S"])


def test_a_reward_is_beta_times_how_much_likelier_it_finds_a_token_than_the_reference(model):
    learner = learner_of(model)
    [rows] = learner._compared(rows_of(0))
    assert not any(found["process_reward_S"].any() for found in learner.learned.find(rows)), "they begin alike"
    step(learner, 0)
    for row, found in zip(rows, learner.learned.find(rows), strict=True):
        [[logprob_S, _]] = learner.learned.model.measure([row])
        wanted_S = 0.5 * (logprob_S.numpy() - row.role_columns["reference_logprob_S"])
        assert found["process_reward_S"] == pytest.approx(wanted_S, abs=1e-7) and wanted_S.any()


def test_a_groups_samples_are_compared_in_whatever_rows_they_lie(model):
    """Advantages by hand, of groups that are spread over rows."""
    learner = learner_of(model, algorithm={"whiten": False, "process_weight": 0.7})
    step(learner, 0)
    batch = batch_of(1, with_outcomes=True, row_tokens=24)
    [rows] = learner.prepare([batch.rows[0]])
    places: dict[str, set[int]] = {}
    rewards, found, outcome = {}, {}, {}
    for number, (row, plain) in enumerate(zip(rows, batch.rows[0], strict=True)):
        for (prompt, sample, _), a, b in zip(row.owners, row.branch_offsets, row.branch_offsets[1:], strict=False):
            places.setdefault(prompt, set()).add(number)
            rewards[prompt, sample] = row.role_columns["process_reward_S"][a:b].astype(np.float64)
            found[prompt, sample], outcome[prompt, sample] = row.advantage_S[a:b], plain.advantage_S[a]
    assert max(map(len, places.values())) > 1
    for (prompt, sample), values in rewards.items():
        others = [r.mean() for (p, s), r in rewards.items() if p == prompt and s != sample]
        left = values - np.mean(others)
        wanted = outcome[prompt, sample] + 0.7 * np.array([left[t:].sum() for t in range(len(left))])
        assert found[prompt, sample] == pytest.approx(wanted, abs=1e-5)


@UPDATES
def test_in_the_warm_up_it_alone_is_trained(model, update):
    learner = learner_of(model, warmup_steps=2, update=update, algorithm={"updates_per_batch": 2})
    policy, learned = [], []
    for _ in range(3):
        before = weights(learner)
        step(learner, 0, 1)
        after = weights(learner)
        learned.append(same(ours(before), after))
        policy.append(same({name: t for name, t in before.items() if name not in ours(before)}, after))
    assert policy == [True, True, False] and not any(learned)


# non-finite values


@UPDATES
@pytest.mark.parametrize("updates", [1, 2])
def test_nonfinite_values_of_it_keep_the_batch_from_both(model, update, updates):
    learner = learner_of(model, update=update, updates=updates)
    step(learner, 3)
    before, kept = weights(learner), state(learner)
    [rows] = rows_of(0)
    rows[0].role_columns["outcome_S"][0] = np.nan
    [found] = learner.train_step([rows], [True])
    assert isinstance(found, NonfiniteBatch) and found.reason == "implicit_reward: the loss is nan"
    name, sample, _ = rows[0].owners[0]
    assert [(c.prompt_id, c.sample, c.what) for c in found.culprits] == [(name, sample, "outcome")]
    assert same(before, weights(learner)) and same_state(kept, state(learner))
    assert isinstance(step(learner, 0)[0], StepMetrics)


@UPDATES
@pytest.mark.parametrize("fault", ["sampling logprob", "loss"])
def test_what_the_policy_cannot_apply_it_does_not_learn(model, update, fault):
    """Also where it learned first: it is back where it was, schedule and moments included."""
    learner = learner_of(model, update=update, lr_scheduler={"decay_ratio": 1.0})
    step(learner, 3)
    before, kept = weights(learner), state(learner)
    batch = with_fault(batch_of(0, with_outcomes=True), fault, "p1", 2)
    [found] = learner.train_step([batch.rows[0]], [True])
    assert {(c.prompt_id, c.sample) for c in found.culprits} == {("p1", 2)}
    assert same(before, weights(learner)) and same_state(kept, state(learner))


@UPDATES
def test_of_several_batches_it_learns_those_that_the_policy_applied(model, update):
    """As if the bad one had not been there."""
    learner, other = (
        learner_of(model, update=update, algorithm={"updates_per_batch": 2}, lr_scheduler={"decay_ratio": 1.0})
        for _ in range(2)
    )
    bad = with_fault(batch_of(0, with_outcomes=True), "sampling logprob", "p1", 2).rows[0]
    answers = learner.train_step([bad, *rows_of(1)], [True, True])
    assert [type(answer) for answer in answers] == [NonfiniteBatch, StepMetrics]
    step(other, 1)
    assert same_state(state(learner), state(other)) and state(learner)[1] == 1


@UPDATES
def test_one_bad_reward_is_blamed_on_its_sample_alone(model, update):
    learner = learner_of(model, update=update)
    find = learner.learned.find

    def spoilt(rows):
        found = find(rows)
        found[0]["process_reward_S"][0] = np.inf
        return found

    learner.learned.find = spoilt
    [rows] = rows_of(0)
    [found] = learner.train_step([rows], [True])
    name, sample, _ = rows[0].owners[0]
    assert {(c.prompt_id, c.sample, c.what) for c in found.culprits} == {(name, sample, "process reward")}


@UPDATES
def test_a_spoilt_weight_of_it_is_named(model, update):
    learner = learner_of(model, update=update)
    with torch.no_grad():
        dict(learner.weights())["implicit_reward.norm.weight"].to_local()[0] = math.nan
    [found] = step(learner, 0)
    assert found.weights == ["implicit_reward.norm.weight"]


# what is kept


@UPDATES
def test_a_snapshot_brings_both_back(model, update):
    settings = {"update": update, "lr_scheduler": {"decay_ratio": 1.0}}
    learner, other = learner_of(model, **settings), learner_of(model, **settings)
    step(learner, 0), step(learner, 1)
    snapshots = make_snapshots(0, learner, learner.config)
    learner.before_update = snapshots.before_update
    snapshots.take(2)
    saved = weights(learner)
    wanted = [numbers(step(learner, seed)[0]) for seed in (7, 8)]
    step(other, 5)
    load_snapshot(other, snapshots.slot_of(2))
    assert same(saved, weights(other))
    assert [numbers(step(other, seed)[0]) for seed in (7, 8)] == wanted
    assert same(weights(learner), weights(other)) and same_state(state(learner), state(other))


def test_a_checkpoint_holds_both(model, tmp_path):
    learner = learner_of(model)
    step(learner, 0)
    saver = BackgroundSave(learner)
    saver.begin(tmp_path)
    saver.wait()
    saved = weights(learner)
    wanted = [numbers(step(learner, seed)[0]) for seed in (7, 8)]
    other = learner_of(model)
    other.load_checkpoint(tmp_path)
    assert same(saved, weights(other))
    assert [numbers(step(other, seed)[0]) for seed in (7, 8)] == wanted


def test_without_a_path_it_begins_as_the_policy_and_transformers_loads_what_it_became(model, tmp_path):
    learner = learner_of(model)
    learner.sft([batch_of(seed).rows[0] for seed in (0, 1)], 1e-3)
    now = weights(learner)
    assert all(torch.equal(tensor, now[name.removeprefix("implicit_reward.")]) for name, tensor in ours(now).items())
    assert not same({"x": now["norm.weight"]}, {"x": weights(learner_of(model))["norm.weight"]})
    step(learner, 0)
    learner.save_hf(tmp_path / "model", beside=tmp_path)
    loaded, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "implicit_reward", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    [[row]] = learner._compared([batch_of(9, row_tokens=1000, share_prefix=False, with_outcomes=True).rows[0]])
    first = row.segments[0]
    with torch.no_grad():
        logits = loaded(torch.from_numpy(row.tokens_T[None, : first.length])).logits[0]
    count = row.owners[0][2]
    wanted = logits.log_softmax(-1)[row.source_S[:count], row.target_S[:count]].numpy()
    [[logprob_S, _]] = learner.learned.model.measure([row])
    assert logprob_S[:count].numpy() == pytest.approx(wanted, abs=1e-4)
    again = learner_of(model, path=str(tmp_path / "implicit_reward"))
    again.sft([batch_of(0).rows[0]], 1e-3)
    assert same(ours(weights(learner)), weights(again))


def test_of_a_policy_with_adapters_it_takes_what_they_add(model):
    """In one process the reference is then the policy without them."""
    learner = learner_of(model, lora={"rank": 2})
    learner.sft([batch_of(0).rows[0]] * 3, 1e-2)
    plain = {shard.name: shard.tensor for shard in learner.shards()}
    merged = {shard.name: shard.merged() for shard in learner.shards()}
    found = {shard.name: shard.tensor for shard in learner.learned.shards()}
    assert found.keys() == merged.keys() and all(torch.equal(found[name], merged[name]) for name in found)
    assert any(not torch.equal(found[name], plain[name]) for name in found)


def test_the_policy_alone_is_saved_where_nothing_beside_it_is_asked_for(model, tmp_path):
    """As where the policy is kept for the reference."""
    learner_of(model).save_hf(tmp_path / "kept_policy")
    assert [path.name for path in tmp_path.iterdir()] == ["kept_policy"]


# settings

PRIME = {"name": "prime"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"implicit_reward": {"updates": 2}}, ["[implicit_reward] has no effect", "algorithm.name = 'grpo'"]),
        ({"implicit_reward": {"beta": 0.0}}, ["implicit_reward.beta = 0.0"]),
        ({"implicit_reward": {"update": "first"}}, ["implicit_reward.update = 'first'"]),
        ({"implicit_reward": {"value_clip": 1.0}}, ["unknown key implicit_reward.value_clip"]),
        ({"algorithm": PRIME, "critic": {"updates": 2}}, ["[critic] has no effect", "algorithm.name = 'prime'"]),
        ({"algorithm": PRIME | {"process_weight": -1}}, ["algorithm.process_weight = -1"]),
        ({"algorithm": PRIME | {"discount": 0}}, ["algorithm.discount = 0"]),
        (
            {"algorithm": PRIME, "implicit_reward": {"optimizer": {"learning_rate": 1}}},
            ["implicit_reward.optimizer.learning_rate"],
        ),
        (
            {"algorithm": PRIME, "implicit_reward": {"lr_scheduler": {"decay": 1}}},
            ["implicit_reward.lr_scheduler.decay"],
        ),
        (
            {"algorithm": PRIME, "implicit_reward": {"warmup_steps": 100}},
            ["implicit_reward.warmup_steps = 100", "training.steps"],
        ),
        ({"algorithm": PRIME, "implicit_reward": {"path": "/nowhere"}}, ["implicit_reward.path = '/nowhere'"]),
    ],
)
def test_a_mistake_in_its_section_is_one_line(tables, words):
    assert_one_line(tables, words)


def test_one_with_other_tokens_is_refused_and_one_that_has_no_words(model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    more = AutoModelForCausalLM.from_pretrained(model)
    more.resize_token_embeddings(more.config.vocab_size + 3)
    more.save_pretrained(tmp_path / "more")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(tmp_path / "values")
    for name, words in {"more": "must read the policy's tokens", "values": "which writes no words"}.items():
        path = str(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / file, path)
        with pytest.raises(ConfigError, match=words):
            check(load_config(None, {"algorithm": PRIME, "implicit_reward": {"path": path}}))


def test_its_settings_bear_on_steps_that_must_be_trained_again():
    def settings(**values):
        return flat({"implicit_reward": {"beta": 0.05, "optimizer": {}} | values})

    assert first_change(settings(), settings(beta=0.1)) == "implicit_reward.beta"
    assert first_change(settings(), settings(optimizer={"lr": 1.0})) == "implicit_reward.optimizer.lr"
    assert not first_change(settings(), settings())
