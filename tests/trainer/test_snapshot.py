"""A state that was put aside comes back bit for bit, from the rank's own memory and from what was kept of it."""

import os
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from test_learner import batch_of, train, weights

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import load_config
from titan_rl.mesh.channel.memory.region import WRITING
from titan_rl.mesh.channel.snapshots.keeper import SnapshotKeeper, fetch_step
from titan_rl.mesh.channel.sources import TornRead
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.snapshot import Snapshots, load_snapshot
from titan_rl.trainer.state.snapshot_kinds import CopiedSnapshots, SnapshotsInPlace, spares_memory
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def make_learner(tmp_path):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=2)
    config = load_config(None, {"optimizer": {"lr": 1e-3}, "training": {"steps": 10}})
    return lambda: Learner(config, build_titan(config), tmp_path)


SPARING = partial(SnapshotsInPlace, spares_memory=True)
CHECKPOINTS = {"checkpoint": {"every": 10}}


@pytest.fixture(params=[CopiedSnapshots, SnapshotsInPlace, SPARING], ids=["copied", "in place", "in place, sparing"])
def kind(request):
    return request.param


def keeper_of(snapshots: Snapshots) -> SnapshotKeeper:
    return SnapshotKeeper(snapshots.region.handle(over_rdma=False))


@pytest.mark.parametrize("was_kept", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_steps_after_a_snapshot_come_out_the_same(make_learner, kind, was_kept, steps_before):
    learner = make_learner()
    for seed in range(steps_before):
        train(learner, seed)
    snapshots = kind(0, learner)
    learner.before_update = snapshots.before_update
    keeper = keeper_of(snapshots)
    torch.manual_seed(5)
    snapshots.take(steps_before)
    assert snapshots.steps() == [steps_before]

    def slot() -> torch.Tensor:
        return fetch_step(keeper.handle, steps_before) if was_kept else snapshots.slot_of(steps_before).clone()

    slot_before = slot() if kind is SPARING else None  # which lasts until the next update
    saved = weights(learner)
    wanted = [train(learner, seed) for seed in (7, 8)]
    random_wanted = torch.rand(1)
    snapshots.steps()

    other = make_learner()
    train(other, 3)
    load_snapshot(other, slot() if slot_before is None else slot_before)
    loaded = weights(other)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    got = [train(other, seed) for seed in (7, 8)]
    assert [(m.loss, m.grad_norm, m.learning_rate) for m in got] == [
        (m.loss, m.grad_norm, m.learning_rate) for m in wanted
    ]
    assert torch.equal(torch.rand(1), random_wanted)
    after, wanted_after = weights(other), weights(learner)
    assert all(torch.equal(after[name], wanted_after[name]) for name in after)
    keeper.close()


def test_two_steps_are_kept_and_the_oldest_goes(make_learner, kind):
    learner = make_learner()
    snapshots = kind(0, learner)
    learner.before_update = snapshots.before_update
    keeper = keeper_of(snapshots)
    for step in range(1, 5):
        learner.train(batch_of(step).rows[0], True)
        snapshots.take(step)
        kept = (step,) if kind is SPARING else (step - 1, step)
        assert snapshots.steps() == keeper.steps() == [s for s in kept if s > 0]
    keeper.close()


@pytest.mark.parametrize("is_stamped", [False, True])
def test_a_half_written_step_is_no_step(make_learner, kind, is_stamped):
    """Neither without its stamp nor with one that came too early."""
    snapshots = kind(0, make_learner())
    for step in (1, 2):
        snapshots.before_update()
        snapshots.take(step)
        assert step in snapshots.steps()
    if is_stamped:
        snapshots.slot_of(2)[-1] += 1
    else:
        stamps = snapshots.region.header.stamps
        stamps[stamps == 2] = WRITING
    keeper = keeper_of(snapshots)
    assert keeper.steps() == ([] if kind is SPARING else [1])
    with pytest.raises(TornRead, match="fails its checksum" if is_stamped else "not 2"):
        fetch_step(keeper.handle, 2)
    keeper.close()


def test_in_place_a_step_stays_until_all_ranks_have_the_next(make_learner):
    """Through the update that follows, and until its own copy is there."""
    learner = make_learner()
    snapshots = SnapshotsInPlace(0, learner)
    keeper, held = keeper_of(snapshots), [one.memory for one in snapshots.layout.held]
    snapshots.take(0)
    for step in (1, 2):
        before = [values.clone() for values in held]
        snapshots.before_update()
        assert keeper.steps() == [step - 1], "in the middle of the update"
        learner.train(batch_of(step).rows[0], True)
        assert keeper.steps() == [step - 1]
        kept = fetch_step(keeper.handle, step - 1)
        assert all(
            torch.equal(place, values) for (_, place), values in zip(snapshots.layout.places(kept), before, strict=True)
        )
        assert not all(map(torch.equal, held, before))
        snapshots.take(step)
        assert snapshots.steps() == keeper.steps() == [step - 1, step], "others may still be at the step before"
        snapshots.settle()
        assert snapshots.steps() == keeper.steps() == [step - 1, step]
    keeper.close()


def test_where_memory_is_spared_there_is_the_state_alone(make_learner):
    """Whole between two updates, and in the middle of one no snapshot at all."""
    learner = make_learner()
    snapshots = SPARING(0, learner)
    keeper, state = keeper_of(snapshots), snapshots.region.slot_bytes
    snapshots.take(0)
    for step in (1, 2):
        assert snapshots.steps() == keeper.steps() == [step - 1]
        snapshots.before_update()
        assert snapshots.steps() == keeper.steps() == []
        learner.train(batch_of(step).rows[0], True)
        snapshots.take(step)
        assert snapshots.steps() == keeper.steps() == [step]
    snapshots.take(3)
    assert snapshots.steps() == keeper.steps() == [3], "a step that changed nothing has one too"
    assert os.fstat(snapshots.region.fd).st_blocks * 512 < 1.1 * state
    keeper.close()


@pytest.mark.parametrize(
    "tables, spares",
    [
        ({}, False),
        (CHECKPOINTS, True),
        (CHECKPOINTS | {"placement": {"mode": "colocated"}}, True),
        (CHECKPOINTS | {"algorithm": {"updates_per_batch": 2}}, False),
        (CHECKPOINTS | {"algorithm": {"name": "ppo"}}, False),
        (CHECKPOINTS | {"recovery": {"snapshot_every": 2}}, False),
    ],
)
def test_memory_is_spared_if_one_update_is_between_snapshots_and_checkpoints_are_written(tables, spares):
    """Else a death is as likely as not between two of them, or sends the run back to its beginning."""
    config = load_config(None, tables)
    assert spares_memory(config, make_algorithm(config.algorithm, []).needs) == spares


def test_in_place_the_state_lies_in_the_memory_that_is_kept(make_learner, tmp_path):
    """No byte of it is anywhere else, also after a checkpoint was loaded; old views say that they are old."""
    learner = make_learner()
    stale = [shard.tensor for shard in learner.shards()]
    wanted = weights(learner)
    snapshots = SnapshotsInPlace(0, learner)
    assert all(torch.isnan(values).all() for values in stale)
    assert all(torch.equal(values, wanted[name]) for name, values in weights(learner).items())
    saver = BackgroundSave(learner)
    saver.begin(tmp_path / "checkpoint")
    saver.wait()
    train(learner, 1)
    learner.load_checkpoint(tmp_path / "checkpoint")
    snapshots.take(0)
    slot = snapshots.region.slots[0]
    begin, end = slot.data_ptr(), slot.data_ptr() + slot.nbytes
    [optimizer] = learner.optimizers()
    moments = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(begin <= values.data_ptr() < end for values in [*moments, *(s.tensor for s in learner.shards())])


A_RANK = """
import pickle, sys, time
import torch
from titan_rl.mesh.channel.memory.checksums import checksums
from titan_rl.mesh.channel.memory.region import Region
region = Region(3, 1 << 20, [(0, 1 << 20)], torch.device("cpu"))
region.slots[1].fill_(7)
region.header.checksums[1] = checksums("xxh3", region.slots[1], region.blocks)
region.header.stamps[1] = 5
pickle.dump(region.handle(over_rdma=False), sys.stdout.buffer)
sys.stdout.flush()
time.sleep(600)
"""


def test_what_is_kept_outlives_the_rank_and_is_the_rank_s_own_memory():
    """No byte is held twice."""
    with subprocess.Popen([sys.executable, "-c", A_RANK], stdout=subprocess.PIPE) as rank:
        handle = pickle.load(rank.stdout)
        keeper = SnapshotKeeper(handle)
        inode = os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_ino
        rank.kill()
    assert keeper.steps() == [5]
    assert torch.equal(fetch_step(keeper.handle, 5), torch.full((1 << 20,), 7, dtype=torch.uint8))
    assert os.fstat(keeper.handle.fd).st_ino == inode and keeper.handle.pid == os.getpid()
    keeper.close()


def test_going_back_makes_later_steps_undone(make_learner, kind):
    """A step that is taken again is another one, though its number is the same."""
    learner = make_learner()
    snapshots = kind(0, learner)
    learner.before_update = snapshots.before_update
    keeper = keeper_of(snapshots)
    for step in (4, 8):
        train(learner, step)
        snapshots.take(step)
    snapshots.take(5)
    assert snapshots.steps() == [4, 5] or snapshots.steps() == [5]
    train(learner, 9)
    snapshots.take(8)
    again = snapshots.slot_of(snapshots.steps()[-1]).clone()
    assert 8 in keeper.steps()
    assert torch.equal(again, fetch_step(keeper.handle, 8))
    keeper.close()
