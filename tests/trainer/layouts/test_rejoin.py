"""A rank that joins anew lets go of the learner before: no time sees two of them in memory, and its snapshots stay."""

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batches import batch_of

from titan_rl.actors.role import Role
from titan_rl.actors.trainer import Trainer
from titan_rl.config.load import load_config
from titan_rl.mesh.channel.plan import Box, Need, Plan, split_name
from titan_rl.mesh.channel.snapshots.keeper import SnapshotKeeper
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer import join as joining
from titan_rl.trainer.roles import frozen_worker
from titan_rl.trainer.state.snapshot_kinds import CopiedSnapshots, SnapshotsInPlace
from titan_rl.trainer.step.learner import Learner


@pytest.fixture
def model_path(tmp_path) -> str:
    make_tiny(tmp_path / "model", seed=1, hidden_size=64, num_layers=2)
    yield str(tmp_path / "model")
    if dist.is_initialized():
        dist.destroy_process_group()


def call(actor, endpoint: str, *arguments):
    """Of an actor in this process."""
    return getattr(type(actor), endpoint)._method(actor, *arguments)


def config_of(**tables):
    return load_config(None, {"optimizer": {"lr": 1e-3}, "training": {"steps": 10}} | tables)


class AtTheBuild:
    """What of the model before is alive when the next is built."""

    def __init__(self, monkeypatch, module, name: str):
        self.old, self.alive, build = {}, None, getattr(module, name)

        def building(*arguments):
            self.alive = [name for name, reference in self.old.items() if reference() is not None]
            return build(*arguments)

        monkeypatch.setattr(module, name, building)

    def watch(self, **objects) -> None:
        self.old |= {name: weakref.ref(one) for name, one in objects.items()}


def open_channel(trainer: Trainer) -> None:
    """As if a generator read all of the model."""
    names = {split_name(shard.name): Box((0,) * len(shard.shape), shard.shape) for shard in trainer.learner.shards()}
    units = {unit: () for unit, _ in names}
    for (unit, name), box in names.items():
        units[unit] += (Need(name, box, "bfloat16"),)
    plan = Plan([call(trainer, "holdings")], [units])
    call(trainer, "open_region", plan.slot(0), False, False)


def train_in_all_ways(trainer: Trainer, folder: Path) -> None:
    """Whatever may keep a view of the model has one."""
    call(trainer, "open_snapshots")
    open_channel(trainer)
    call(trainer, "take_snapshot", 0)
    rows = batch_of(0).rows[0]
    trainer.learner.train(rows, True)
    call(trainer, "take_snapshot", 1)
    call(trainer, "stage", 1)
    call(trainer, "begin_checkpoint", str(folder))
    trainer.saver.wait()
    trainer.gradients = trainer.learner.gradients(rows)


@pytest.mark.parametrize("kind", [CopiedSnapshots, SnapshotsInPlace])
def test_the_learner_before_is_gone_when_the_next_is_built(model_path, kind, tmp_path, monkeypatch):
    if kind is CopiedSnapshots:
        monkeypatch.setattr(Learner, "has_views", True)
    at_the_build = AtTheBuild(monkeypatch, joining, "join_rank")
    config, trainer = config_of(), Trainer(model_path)
    call(trainer, "join", config, 0, 1, str(tmp_path / "first"))
    assert isinstance(trainer.opening, kind)
    train_in_all_ways(trainer, tmp_path / "checkpoint")
    learner = trainer.learner
    [optimizer] = learner.optimizers()
    moments = {f"moment of {i}": state["exp_avg"] for i, state in enumerate(optimizer.state.values())}
    parameters = {name: parameter for name, parameter in learner.weights()}
    at_the_build.watch(learner=learner, saver=trainer.saver, writer=trainer.writer, **moments, **parameters)
    wanted = {shard.name: shard.tensor.clone() for shard in learner.shards()}
    steps, region = call(trainer, "snapshot_steps"), trainer.snapshots.region
    del learner, optimizer, moments, parameters

    call(trainer, "join", config, 0, 1, str(tmp_path / "second"))
    assert at_the_build.alive == []
    assert call(trainer, "snapshot_steps") == steps and 1 in steps
    call(trainer, "restore", 1, None)
    assert all(torch.equal(shard.tensor, wanted[shard.name]) for shard in trainer.learner.shards())

    handle = call(trainer, "open_snapshots")
    assert (trainer.snapshots.region is region) == (kind is CopiedSnapshots), "host memory is there once"
    keeper = SnapshotKeeper(handle)
    assert call(trainer, "snapshot_steps") == keeper.steps() == [], "they count no more"
    call(trainer, "take_snapshot", 1)
    assert call(trainer, "snapshot_steps") == keeper.steps() == [1]
    keeper.close()


def test_memory_of_another_layout_is_not_taken_over(model_path, tmp_path, monkeypatch):
    """A setting has changed, and with it what is trained."""
    at_the_build = AtTheBuild(monkeypatch, joining, "join_rank")
    trainer = Trainer(model_path)
    lora = {"rank": 4, "alpha": 8}
    call(trainer, "join", config_of(lora=lora), 0, 1, str(tmp_path / "first"))
    before = call(trainer, "open_snapshots")
    at_the_build.watch(learner=trainer.learner, adapters=trainer.learner.policy.adapters)
    call(trainer, "join", config_of(lora=lora | {"rank": 8}), 0, 1, str(tmp_path / "second"))
    assert at_the_build.alive == []
    assert call(trainer, "open_snapshots").fd != before.fd


def test_a_rank_whose_join_failed_still_has_its_snapshots(model_path, tmp_path, monkeypatch):
    """A peer may die in the middle of a repair."""
    config, trainer = config_of(), Trainer(model_path)
    call(trainer, "join", config, 0, 1, str(tmp_path / "first"))
    call(trainer, "open_snapshots")
    call(trainer, "take_snapshot", 3)

    def fails(*_):
        raise RuntimeError("a peer is gone")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="a peer is gone"):
        patched.setattr(joining, "join_rank", fails)
        call(trainer, "join", config, 0, 1, str(tmp_path / "second"))
    call(trainer, "join", config, 0, 1, str(tmp_path / "third"))
    assert call(trainer, "snapshot_steps") == [3]
    call(trainer, "restore", 3, None)


def test_a_role_s_model_before_is_gone_when_the_next_is_built(model_path, tmp_path, monkeypatch):
    at_the_build = AtTheBuild(monkeypatch, frozen_worker, "FrozenRoleWorker")
    config = config_of(reference={"placement": "own"}, algorithm={"kl_coefficient": 0.1})
    role = Role("reference", model_path, "")
    call(role, "join", config, 0, 1, str(tmp_path / "first"))
    at_the_build.watch(model=role.model)
    call(role, "join", config, 0, 1, str(tmp_path / "second"))
    assert at_the_build.alive == []
