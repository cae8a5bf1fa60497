"""A state that was put aside comes back bit for bit, from the rank's own memory and from its keeper's."""

import time

import pytest
import torch
import torch.distributed as dist
from test_learner import batch_of, train, weights

from titan_rl.config.load import load_config
from titan_rl.mesh.channel.region import WRITING
from titan_rl.mesh.channel.snapshot_replica import Keeper, fetch_step
from titan_rl.mesh.channel.sources import TornRead
from titan_rl.models.tiny import make_tiny
from titan_rl.trainer.learner import Learner
from titan_rl.trainer.snapshot import Snapshots
from titan_rl.trainer.titan_config import build_titan


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_learner(tmp_path):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=2)
    config = load_config(None, {"optimizer": {"lr": 1e-3}, "training": {"steps": 10}})
    return lambda: Learner(config, build_titan(config), tmp_path)


def kept(keeper: Keeper, step: int) -> None:
    deadline = time.monotonic() + 10
    while step not in [int(stamp) for stamp in keeper.region.header.stamps]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("from_keeper", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_steps_after_a_snapshot_come_out_the_same(make_learner, from_keeper, steps_before):
    learner = make_learner()
    for seed in range(steps_before):
        train(learner, seed)
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    keeper = Keeper(snapshots.region.handle(over_rdma=False))
    torch.manual_seed(5)
    snapshots.take(steps_before)
    saved = weights(learner)
    wanted = [train(learner, seed) for seed in (7, 8)]
    random_wanted = torch.rand(1)
    kept(keeper, steps_before)

    other = make_learner()
    train(other, 3)
    slot = snapshots.slot_of(steps_before)
    if from_keeper:
        slot = fetch_step(keeper.region.handle(over_rdma=False), steps_before)
    Snapshots(0, other).load(slot)
    loaded = weights(other)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    got = [train(other, seed) for seed in (7, 8)]
    assert [(m.loss, m.grad_norm, m.learning_rate) for m in got] == [
        (m.loss, m.grad_norm, m.learning_rate) for m in wanted
    ]
    assert torch.equal(torch.rand(1), random_wanted)
    after, wanted_after = weights(other), weights(learner)
    assert all(torch.equal(after[name], wanted_after[name]) for name in after)
    keeper.stop()


def test_two_steps_are_kept_and_the_oldest_goes(make_learner):
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    keeper = Keeper(snapshots.region.handle(over_rdma=False))
    for step in range(1, 5):
        learner.train(batch_of(step).rows[0], True)
        snapshots.take(step)
        assert snapshots.steps() == [s for s in (step - 1, step) if s > 0]
        kept(keeper, step)
    assert keeper.steps() == [3, 4]


def test_a_half_written_step_is_not_kept(make_learner):
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    snapshots.take(1)
    snapshots.steps()
    snapshots.take(2)
    snapshots.steps()
    snapshots.region.header.stamps[1] = WRITING
    keeper = Keeper(snapshots.region.handle(over_rdma=False))
    assert keeper.steps() == [1]
    with pytest.raises(TornRead, match="not 2"):
        fetch_step(keeper.region.handle(over_rdma=False), 2)


def test_what_was_kept_outlives_its_source(make_learner):
    snapshots = Snapshots(0, make_learner())
    snapshots.take(1)
    keeper = Keeper(snapshots.region.handle(over_rdma=False))
    kept(keeper, 1)
    keeper.stop()
    wanted = snapshots.slot_of(1).clone()
    for slot in snapshots.region.slots:
        slot.fill_(255)
    assert torch.equal(fetch_step(keeper.region.handle(over_rdma=False), 1), wanted)


def test_going_back_makes_later_steps_undone(make_learner):
    """A step that is taken again is another one, though its number is the same."""
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    keeper = Keeper(snapshots.region.handle(over_rdma=False))
    for step in (4, 8):
        train(learner, step)
        snapshots.take(step)
        kept(keeper, step)
    snapshots.take(5)
    kept(keeper, 5)
    assert snapshots.steps() == [4, 5] or snapshots.steps() == [5]
    train(learner, 9)
    snapshots.take(8)
    again = snapshots.slot_of(snapshots.steps()[-1]).clone()
    assert torch.equal(again, _slot_at(keeper, 8))
    keeper.stop()


def _slot_at(keeper: Keeper, step: int) -> torch.Tensor:
    assert step in keeper.steps()
    return fetch_step(keeper.region.handle(over_rdma=False), step)
