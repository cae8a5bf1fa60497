"""A draft model that learns beside the policy: by what it learns, and that the policy learns as without it."""

import numpy as np
import pytest
import torch
from batches import batch_of

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.interactive.change_settings import _check_roles
from titan_rl.controller.preflight.checks import check, resolve
from titan_rl.controller.preflight.live_settings import Effect, effects_of
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.mesh.channel import plan
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.roles.names import DRAFTER
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
DRAFTS = {"generator": {"speculative": {"method": "draft_model"}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "policy", seed=1, hidden_size=64, num_layers=2)
    make_tiny(folder / "draft", seed=2, num_layers=1)
    return folder


def learner_of(models, *, drafter: dict | None = None) -> Learner:
    tables = {"optimizer": {"lr": 1e-3}, "training": {"steps": 10}}
    if drafter is not None:
        tables |= DRAFTS | {"drafter": {"path": str(models / "draft"), "optimizer": {"lr": 1e-2}} | drafter}
    config = load_config(None, tables)
    return Learner(config, build_titan(config), models / "policy")


def step(learner: Learner, rows: list):
    [metrics] = learner.train_step([rows], [True])
    return metrics


def policy_of(learner: Learner) -> list[torch.Tensor]:
    return [shard.tensor.clone() for shard in learner.shards()]


def test_it_learns_the_likelihood_of_what_was_sampled_and_moves_the_policy_by_no_bit(models):
    rows = batch_of(0).rows[0]
    alone, learner = learner_of(models), learner_of(models, drafter={})
    logprob_S = torch.cat([logprob_S for [logprob_S, _] in learner.learned.model.measure(rows)])
    weight_S = torch.from_numpy(np.concatenate([row.weight_S for row in rows]))
    is_sampled_S = weight_S > 0
    loss = -float((weight_S * logprob_S)[is_sampled_S].sum())
    told = [step(learner, rows).loss_metrics for _ in range(8)]
    for _ in range(8):
        step(alone, rows)
    assert told[0]["drafter_loss"] == pytest.approx(loss, rel=1e-5)
    assert told[0]["drafter_logprob"] == pytest.approx(float(logprob_S[is_sampled_S].mean()), rel=1e-5)
    assert told[-1]["drafter_loss"] < told[0]["drafter_loss"] - 0.5
    assert all(torch.equal(one, other) for one, other in zip(policy_of(alone), policy_of(learner), strict=True))


def test_a_version_has_its_tensors_under_names_of_their_own(models):
    learner = learner_of(models, drafter={})
    names = {shard.name for shard in learner.sent()}
    drafts = {name for name in names if name.startswith(plan.DRAFTER)}
    assert f"{DRAFTER}." == plan.DRAFTER and names - drafts == {shard.name for shard in learner.shards()}
    assert drafts == {f"drafter.{shard.name}" for shard in learner.learned.shards()}
    assert {name.removeprefix("drafter.") for name in drafts} < {shard.name for shard in learner.shards()}


def test_a_directory_that_is_not_there_is_named_by_the_setting_that_was_given():
    with pytest.raises(ConfigError, match="^drafter.path = 'nowhere'"):
        load_config(None, DRAFTS | {"drafter": {"path": "nowhere"}})


def test_settings_of_a_run_with_it_change_between_two_steps(models):
    path = {"path": str(models / "draft")}
    checked = resolve(load_config(None, DRAFTS | {"drafter": path}))
    _check_roles(checked, load_config(None, DRAFTS | {"drafter": path | {"optimizer": {"lr": 1e-4}}}), "drafter")
    assert effects_of("drafter.optimizer.lr", on_data=False) == {Effect.TRAINER}


def test_a_batch_that_is_not_finite_moves_neither(models):
    learner = learner_of(models, drafter={})
    before = [tensor.clone() for tensor in learner.learned._state()], policy_of(learner)
    forward_backward = learner.learned.forward_backward
    learner.learned.forward_backward = lambda rows: forward_backward(rows) | {"loss": torch.tensor(np.nan)}
    assert isinstance(step(learner, batch_of(0).rows[0]), NonfiniteBatch)
    after = [tensor.clone() for tensor in learner.learned._state()], policy_of(learner)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"generator": {}, "drafter": {"updates": 2}},
            "drafter.updates = 2: [drafter] has no effect: no draft model learns without",
        ),
        (
            {"generator": {}},
            "drafter.path = '{draft}': [drafter] has no effect: it is of generator.speculative.method = 'draft_model'",
        ),
        ({"generator": {"speculative": {"method": "draft_model", "model": "other"}}}, "leave the latter out"),
        ({"algorithm": {"name": "ppo"}}, "needs a model that learns, too (critic), and one"),
        ({"lora": {"rank": 4, "sync": "adapter"}}, "generators are sent adapters alone; set lora.sync = 'merged'"),
        ({"drafter": {"optimizer": {"name": "none"}}}, "drafter.optimizer.name"),
    ],
)
def test_what_it_cannot_go_with_is_one_line(models, tables, said):
    path = {"path": str(models / "draft")}
    drafter = tables.get("drafter", {})
    tables = DRAFTS | tables
    tables["drafter"] = drafter if "updates" in drafter else path | drafter
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, tables))
    assert said.format(draft=models / "draft") in str(caught.value) and "\n" not in str(caught.value)
