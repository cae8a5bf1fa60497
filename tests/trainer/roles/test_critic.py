"""A critic that learns beside the policy: what it computes, that both are kept and taken back together."""

import copy
import math

import numpy as np
import pytest
import torch
from batches import batch_of, with_fault
from mistakes import assert_one_line

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import StepMetrics
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.snapshot import load_snapshot
from titan_rl.trainer.state.snapshot_kinds import make_snapshots
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

CRITIC = {"optimizer": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def learner_of(model, *, algorithm: dict = {}, critic: dict | None = {}) -> Learner:  # noqa: B006 (never changed)
    tables = {
        "algorithm": {"name": "ppo"} | algorithm,
        "critic": {} if critic is None else CRITIC | critic,
        "optimizer": {"lr": 1e-3},
        "training": {"steps": 10},
    }
    config = load_config(None, tables)
    return Learner(config, build_titan(config), model)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.weights()}


def same(before: dict, after: dict, beginning: str = "") -> bool:
    return all(torch.equal(before[name], after[name]) for name in before if name.startswith(beginning))


def step(learner: Learner, *seeds: int) -> list[StepMetrics | NonfiniteBatch]:
    return learner.train_step([batch_of(seed).rows[0] for seed in seeds], [True] * len(seeds))


def numbers(metrics: StepMetrics) -> tuple:
    return metrics.loss, metrics.grad_norm, metrics.loss_metrics


def test_a_critic_learns_beside_the_policy_and_comes_to_explain_the_returns(model):
    learner = learner_of(model, critic={"value_clip": 0, "updates": 4})
    before = weights(learner)
    told = [step(learner, 0)[0].loss_metrics for _ in range(10)]
    after = weights(learner)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert told[0]["critic_value"] == 0 and told[0]["critic_explained_variance"] == pytest.approx(0, abs=1e-3)
    assert told[-1]["critic_loss"] < told[0]["critic_loss"] / 2 and told[-1]["critic_explained_variance"] > 0.5
    assert told[0]["critic_learning_rate"] == 1e-2


def test_values_are_those_of_before_the_first_update(model):
    """However many updates a step has, the second one's rows have the values and returns of the beginning."""
    learner = learner_of(model)
    step(learner, 3)
    batches = [batch_of(seed).rows[0] for seed in (0, 1)]
    wanted = learner.prepare(copy.deepcopy(batches))
    seen = []
    learn = learner.learned.learn
    learner.learned.learn = lambda rows: (seen.append(rows), learn(rows))[1]
    learner.train_step(batches, [True, True])
    for rows, expected in zip(seen, wanted, strict=True):
        for row, other in zip(rows, expected, strict=True):
            assert all(
                np.array_equal(row.role_columns[name], other.role_columns[name]) for name in ("value_S", "return_S")
            )
            assert np.array_equal(row.advantage_S, other.advantage_S) and row.role_columns["value_S"].any()


def test_in_the_warm_up_only_the_critic_is_trained(model):
    learner = learner_of(model, critic={"warmup_steps": 2}, algorithm={"updates_per_batch": 2})
    policy, critic = [], []
    for _ in range(3):
        before = weights(learner)
        step(learner, 0, 1)
        after = weights(learner)
        critic.append(same(before, after, "critic."))
        policy.append(all(torch.equal(before[name], after[name]) for name in before if not name.startswith("critic.")))
    assert policy == [True, True, False] and not any(critic)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("fault", ["value", "return"])
def test_nonfinite_values_of_the_critic_keep_the_batch_from_both(model, updates, fault, monkeypatch):
    learner = learner_of(model, critic={"updates": updates})
    step(learner, 3)
    before, moments = weights(learner), [t.clone() for t in learner.learned._state()]
    if fault == "return":  # infinite squares, though the policy's own loss is finite
        refine = learner.algorithm.refine

        def spoilt(inputs):
            found = refine(inputs)
            found.return_S[inputs.offsets_N[1] - 1] = 1e30
            return found

        monkeypatch.setattr(learner.algorithm, "refine", spoilt)
    else:  # it goes wrong in the last of its updates
        update, count = learner.learned._gradients, []

        def failing(rows):
            count.append(1)
            if len(count) == updates:
                learner.learned.forward_backward(rows)
                raise FloatingPointError("the loss is nan")
            return update(rows)

        monkeypatch.setattr(learner.learned, "_gradients", failing)
    [found] = step(learner, 0)
    assert isinstance(found, NonfiniteBatch) and found.reason.startswith("critic: the loss is")
    assert not found.weights
    if fault == "return":
        assert {culprit.what for culprit in found.culprits} == {"loss"} and found.culprits
    assert same(before, weights(learner))
    assert all(torch.equal(a, b) for a, b in zip(moments, learner.learned._state(), strict=True))
    monkeypatch.undo()
    assert isinstance(step(learner, 0)[0], StepMetrics)


def test_a_spoilt_weight_of_the_critic_is_named(model):
    learner = learner_of(model)
    with torch.no_grad():
        dict(learner.weights())["critic.norm.weight"].to_local()[0] = math.nan
    [found] = step(learner, 0)
    assert found.weights == ["critic.norm.weight"]


def test_what_the_policy_cannot_apply_the_critic_does_not_learn(model):
    learner = learner_of(model)
    batch = with_fault(batch_of(0), "sampling logprob", "p1", 2)
    before = weights(learner)
    [found] = learner.train_step([batch.rows[0]], [True])
    assert [(c.prompt_id, c.sample) for c in found.culprits] == [("p1", 2)]
    assert same(before, weights(learner))


def test_an_infinite_reward_is_blamed_on_its_sample_alone(model):
    learner = learner_of(model)
    batch = with_fault(batch_of(0), "loss", "p1", 2)
    before = weights(learner)
    [found] = learner.train_step([batch.rows[0]], [True])
    assert {(c.prompt_id, c.sample, c.what) for c in found.culprits} == {("p1", 2, "return")}
    assert same(before, weights(learner))


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_snapshot_brings_both_back(model, warmup_steps):
    learner = learner_of(model, critic={"warmup_steps": warmup_steps, "lr_scheduler": {"decay_ratio": 1.0}})
    step(learner, 0), step(learner, 1)
    snapshots = make_snapshots(0, learner, learner.config)
    learner.before_update = snapshots.before_update
    snapshots.take(2)
    saved = weights(learner)
    wanted = [numbers(step(learner, seed)[0]) for seed in (7, 8)]
    other = learner_of(model, critic={"warmup_steps": warmup_steps, "lr_scheduler": {"decay_ratio": 1.0}})
    step(other, 5)
    load_snapshot(other, snapshots.slot_of(2))
    assert same(saved, weights(other))
    assert [numbers(step(other, seed)[0]) for seed in (7, 8)] == wanted
    assert same(weights(learner), weights(other))


def test_a_checkpoint_holds_both(model, tmp_path):
    learner = learner_of(model, critic={"updates": 2})
    step(learner, 0)
    saver = BackgroundSave(learner)
    saver.begin(tmp_path)
    saver.wait()
    saved = weights(learner)
    wanted = [numbers(step(learner, seed)[0]) for seed in (7, 8)]
    other = learner_of(model, critic={"updates": 2})
    other.load_checkpoint(tmp_path)
    assert same(saved, weights(other))
    assert [numbers(step(other, seed)[0]) for seed in (7, 8)] == wanted


def test_a_critic_that_the_checkpoint_lacks_begins_as_the_policy_in_it(model, tmp_path):
    former = learner_of(model, algorithm={"name": "grpo"}, critic=None)
    step(former, 0)
    saver = BackgroundSave(former)
    saver.begin(tmp_path)
    saver.wait()
    learner = learner_of(model)
    step(learner, 1)
    learner.load_checkpoint(tmp_path)
    now = weights(learner)
    assert same(weights(former), now)
    body = [name for name in now if name.startswith("critic.") and name != "critic.lm_head.weight"]
    assert body and all(torch.equal(now[name], now[name.removeprefix("critic.")]) for name in body)


def test_without_a_path_the_critic_begins_as_the_policy_is_after_its_supervised_steps(model, tmp_path):
    learner = learner_of(model)
    learner.sft([batch_of(seed).rows[0] for seed in (0, 1)], 1e-3)
    now = weights(learner)
    for name, tensor in now.items():
        if name.startswith("critic.") and name != "critic.lm_head.weight":
            assert torch.equal(tensor, now[name.removeprefix("critic.")]), name
    step(learner, 0)
    learner.save_hf(tmp_path / "model", beside=tmp_path)
    again = learner_of(model, critic={"path": str(tmp_path / "critic")})
    again.sft([batch_of(0).rows[0]], 1e-3)
    assert same({name: t for name, t in weights(learner).items() if name.startswith("critic.")}, weights(again))


PPO = {"name": "ppo"}
DP2, TP7 = {"data_parallel_shard_degree": 2}, {"tensor_parallel_degree": 7}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"critic": {"updates": 2}}, ["[critic] has no effect", "algorithm.name = 'grpo'"]),
        ({"critic": {"placement": "own"}}, ["[critic] has no effect", "algorithm.name = 'grpo'"]),
        ({"algorithm": PPO, "critic": {"placement": "apart"}}, ["critic.placement = 'apart'"]),
        ({"algorithm": PPO, "critic": {"parallelism": DP2}}, ["critic.parallelism is of processes of its own"]),
        (
            {"algorithm": PPO, "critic": {"placement": "own", "parallelism": TP7}},
            ["critic.parallelism.tensor_parallel"],
        ),
        ({"critic": {"value_clip": -1.0}}, ["critic.value_clip = -1.0"]),
        ({"algorithm": PPO, "critic": {"optimizer": {"learning_rate": 1}}}, ["critic.optimizer.learning_rate"]),
        ({"algorithm": PPO, "critic": {"lr_scheduler": {"decay": 1}}}, ["critic.lr_scheduler.decay"]),
        ({"algorithm": PPO, "critic": {"warmup_steps": 100}}, ["critic.warmup_steps = 100", "training.steps"]),
        ({"algorithm": PPO, "critic": {"path": "/nowhere"}}, ["critic.path = '/nowhere'"]),
    ],
)
def test_a_mistake_in_the_critics_section_is_one_line(tables, words):
    assert_one_line(tables, words)


def test_a_critic_with_other_tokens_is_refused_and_one_of_two_labels(model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    critic.save_pretrained(tmp_path / "two")
    torch.manual_seed(1)  # of the head, which the files do not have
    critic = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    critic.resize_token_embeddings(critic.config.vocab_size + 3)
    critic.save_pretrained(tmp_path / "more")
    for name, words in {"two": "a value head has one label", "more": "must read the policy's tokens"}.items():
        with pytest.raises(ConfigError, match=words):
            check(load_config(None, {"algorithm": {"name": "ppo"}, "critic": {"path": str(tmp_path / name)}}))
