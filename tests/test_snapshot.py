"""A state that was put aside comes back bit for bit, from the rank's own memory and from its replica."""

import time

import pytest
import torch
from test_learner import batch_of, train, weights

from titan_rl.config.load import load_config
from titan_rl.mesh.channel.region import WRITING
from titan_rl.mesh.channel.snapshot_replica import SnapshotReplica, fetch_step
from titan_rl.mesh.channel.sources import TornRead
from titan_rl.models.tiny import make_tiny
from titan_rl.trainer.learner import Learner
from titan_rl.trainer.snapshot import Snapshots
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def make_learner(tmp_path):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=2)
    config = load_config(None, {"optimizer": {"lr": 1e-3}, "training": {"steps": 10}})
    return lambda: Learner(config, build_titan(config), tmp_path)


def wait_for_replica(replica: SnapshotReplica, step: int) -> None:
    deadline = time.monotonic() + 10
    while step not in [int(stamp) for stamp in replica.region.header.stamps]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("from_replica", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_steps_after_a_snapshot_come_out_the_same(make_learner, from_replica, steps_before):
    learner = make_learner()
    for seed in range(steps_before):
        train(learner, seed)
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    replica = SnapshotReplica(snapshots.region.handle(over_rdma=False))
    torch.manual_seed(5)
    snapshots.take(steps_before)
    saved = weights(learner)
    wanted = [train(learner, seed) for seed in (7, 8)]
    random_wanted = torch.rand(1)
    wait_for_replica(replica, steps_before)

    other = make_learner()
    train(other, 3)
    slot = snapshots.slot_of(steps_before)
    if from_replica:
        slot = fetch_step(replica.region.handle(over_rdma=False), steps_before)
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
    replica.stop()


def test_two_steps_are_kept_and_the_oldest_goes(make_learner):
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    replica = SnapshotReplica(snapshots.region.handle(over_rdma=False))
    for step in range(1, 5):
        learner.train(batch_of(step).rows[0], True)
        snapshots.take(step)
        assert snapshots.steps() == [s for s in (step - 1, step) if s > 0]
        wait_for_replica(replica, step)
    assert replica.steps() == [3, 4]


def test_a_half_written_step_is_not_copied(make_learner):
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    snapshots.take(1)
    snapshots.steps()
    snapshots.take(2)
    snapshots.steps()
    snapshots.region.header.stamps[1] = WRITING
    replica = SnapshotReplica(snapshots.region.handle(over_rdma=False))
    assert replica.steps() == [1]
    with pytest.raises(TornRead, match="not 2"):
        fetch_step(replica.region.handle(over_rdma=False), 2)


def test_a_replica_outlives_its_source(make_learner):
    snapshots = Snapshots(0, make_learner())
    snapshots.take(1)
    replica = SnapshotReplica(snapshots.region.handle(over_rdma=False))
    wait_for_replica(replica, 1)
    replica.stop()
    wanted = snapshots.slot_of(1).clone()
    for slot in snapshots.region.slots:
        slot.fill_(255)
    assert torch.equal(fetch_step(replica.region.handle(over_rdma=False), 1), wanted)


def test_going_back_makes_later_steps_undone(make_learner):
    """A step that is taken again is another one, though its number is the same."""
    learner = make_learner()
    snapshots = Snapshots(0, learner)
    learner.before_update = snapshots.wait_until_copied
    replica = SnapshotReplica(snapshots.region.handle(over_rdma=False))
    for step in (4, 8):
        train(learner, step)
        snapshots.take(step)
        wait_for_replica(replica, step)
    snapshots.take(5)
    wait_for_replica(replica, 5)
    assert snapshots.steps() == [4, 5] or snapshots.steps() == [5]
    train(learner, 9)
    snapshots.take(8)
    again = snapshots.slot_of(snapshots.steps()[-1]).clone()
    assert torch.equal(again, _slot_at(replica, 8))
    replica.stop()


def _slot_at(replica: SnapshotReplica, step: int) -> torch.Tensor:
    assert step in replica.steps()
    return fetch_step(replica.region.handle(over_rdma=False), step)
