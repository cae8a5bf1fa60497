"""A rank dies: its peers hear of it and end what would wait for it, and what it had put aside is with somebody else."""

import asyncio
from functools import cache
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titan_rl.mesh.control.trainer_snapshots import TrainerSnapshots, keeper_order
from titan_rl.mesh.supervision import abort_collectives
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.deaths import DeathHandlers
from titan_rl.mesh.supervision.peers import PeerNotifier
from titan_rl.trainer.distributed.process_group import join_group, leave_group, leave_group_on_error


@cache
def host_named(name: str):
    return SimpleNamespace(name=name, is_remote=False, facts=None)


def process(name: str, host: str = "", is_dead: bool = False):
    asked = []

    async def ask_sidecar(request):
        asked.append(request.endpoint)
        if name == "mute":
            raise ActorDied([], "its sidecar was asked")

    return SimpleNamespace(
        name=name,
        host=host_named(host),
        is_dead=is_dead,
        is_stopping=False,
        deaths=DeathHandlers(),
        asked=asked,
        ask_sidecar=ask_sidecar,
    )


async def die(one) -> None:
    one.is_dead = True
    one.deaths.run(one)
    await asyncio.sleep(0.01)


def test_peers_hear_of_a_death_once_and_others_do_not():
    async def run():
        ranks = [process(name) for name in ("0", "1", "mute", "3")]
        told = PeerNotifier(lambda: ranks)
        for rank in ranks:
            assert told.watch(rank) is rank
        await die(ranks[3])
        before, ranks[3] = ranks[3], told.watch(process("replaced"))
        await die(ranks[1])
        assert [one.asked for one in (*ranks, before)] == [
            ["end_collectives"] * 2,
            ["end_collectives"],
            ["end_collectives"] * 2,
            ["end_collectives"],
            [],
        ]
        ranks[0].is_stopping = True
        await die(ranks[0])
        assert ranks[3].asked == ["end_collectives"], "one that was told to go is no fault"

    asyncio.run(run())


class FakeNccl:
    """A group that says that it is NCCL's, and how often it was aborted."""

    def __init__(self, monkeypatch):
        self.aborted = 0
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", self.abort)

    def abort(self) -> None:
        assert abort_collectives._ended.is_set(), "whoever goes on must be able to know"
        self.aborted += 1
        dist.destroy_process_group()


@pytest.fixture
def group(tmp_path):
    join_group(0, 1, str(tmp_path / "meeting"), 30.0)
    yield
    leave_group()
    abort_collectives.begin_anew()


def test_gloo_is_left_alone(group):
    assert abort_collectives.end_collectives() is False
    with leave_group_on_error():
        dist.barrier()
    assert dist.is_initialized()


def test_where_nobody_has_met_there_is_nothing_to_end():
    assert abort_collectives.end_collectives() is False
    abort_collectives.check_peers()


def test_what_nccl_gave_after_a_peer_s_death_is_never_used(group, monkeypatch, tmp_path):
    """An aborted kernel ends without an error, and whoever waited for it goes on with what lies in its memory."""
    nccl = FakeNccl(monkeypatch)
    with pytest.raises(abort_collectives.PeerGone), leave_group_on_error():
        assert abort_collectives.end_collectives() is True
    assert nccl.aborted == 1 and not dist.is_initialized()
    monkeypatch.undo()
    join_group(0, 1, str(tmp_path / "again"), 30.0)
    with leave_group_on_error():
        dist.barrier()


def test_a_rank_that_fails_waits_for_nothing_that_is_under_way(group, monkeypatch):
    nccl = FakeNccl(monkeypatch)
    with pytest.raises(ValueError, match="a mistake"), leave_group_on_error():
        raise ValueError("a mistake")
    assert nccl.aborted == 1 and not dist.is_initialized()


def test_no_snapshot_is_taken_of_it(group, monkeypatch):
    from titan_rl.actors.trainer import Trainer

    FakeNccl(monkeypatch)
    trainer, taken = Trainer("model"), []
    trainer.snapshots = SimpleNamespace(take=taken.append)
    abort_collectives.end_collectives()
    with pytest.raises(abort_collectives.PeerGone):
        trainer._end_step(7)
    assert not taken


def names(processes) -> list[str]:
    return [one.name for one in processes]


def test_keepers_are_off_the_rank_s_host_and_no_peers_where_there_are_others():
    here = [process("peer here", "a"), process("peer there", "b")]
    generators = [process("generator here", "a"), process("generator there", "b")]
    assert names(keeper_order(host_named("a"), here, generators)) == [
        *("generator there", "peer there", "generator here", "peer here"),
    ]
    assert names(keeper_order(host_named("a"), here, [])) == ["peer there", "peer here"]
    assert keeper_order(host_named("a"), [], []) == []


def test_the_next_one_of_these_that_lives_keeps_them():
    ranks = [process(f"rank {i}", "a") for i in range(3)]
    leaders = [process("generator 0", "a", is_dead=True), process("generator 1", "a")]
    owner = TrainerSnapshots(SimpleNamespace(ranks=ranks, world_size=3), SimpleNamespace(leaders=leaders), seconds=1.0)
    assert owner._choose_keeper(1).name == "generator 1"
    leaders[1].is_dead = True
    assert owner._choose_keeper(1).name == "rank 2", "peers from the next one on"
    ranks[2].is_dead = True
    assert owner._choose_keeper(1).name == "rank 0"
    ranks[0].is_dead = True
    assert owner._choose_keeper(1) is None
