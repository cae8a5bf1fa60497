"""Weights between real actors: updates under running requests, and syncs in which somebody dies or fails."""

import asyncio
import mmap
import os
import signal
import time

import numpy as np
import pytest
from monarch.actor import ActorError
from started_meshes import ask, learn, meshes_of, pid_of, worst_difference
from waiting import eventually

from titan_rl.data.types import Completion, Request
from titan_rl.mesh.channel.memory.region import header_pages
from titan_rl.mesh.channel.transports import has_ibverbs
from titan_rl.mesh.control.trainer_repair import ActorFault
from titan_rl.mesh.members.endpoints import GeneratorEndpoints
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.calls import call, call_all
from titan_rl.mesh.weights.channel_link import WeightLink
from titan_rl.models.builtin.tiny import make_tiny

pytestmark = pytest.mark.slow
SUPERVISION_SECONDS = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    return str(path)


async def sync(meshes: Meshes, version: int) -> None:
    await meshes.weights.stage(version)
    await meshes.weights.announce(version)


def tokens_of_version(group, version: int) -> list:
    """A group for each completion that has tokens of that version, as if all before them were its prompt."""
    prompt, completions = group
    found = []
    for completion in completions:
        new = completion.versions == version
        if new.any():
            arrays = (values[new] for values in (completion.tokens, completion.logprobs, completion.versions))
            found.append((np.concatenate([prompt, completion.tokens[~new]]), [Completion(*arrays, "stop")]))
    return found


async def update_under_way(meshes: Meshes):
    """A group that was sampled across an update from version 0 to 1, and one that began right after it."""
    await learn(meshes, 0)
    await sync(meshes, 0)
    # how long a machine takes for the tokens is not known: what is delivered lies ready, and is delivered ever later
    for version, head_start in enumerate((0.02, 0.05, 0.1, 0.2, 0.4, 0.8), start=1):
        await learn(meshes, 1)
        await meshes.weights.stage(version)
        running = ask(meshes, list(range(1, 17)), 120)
        await asyncio.sleep(head_start)
        await meshes.weights.announce(version)
        fresh = ask(meshes, list(range(101, 109)), 20)
        group = await running
        if {version - 1, version} <= {int(v) for c in group[1] for v in c.versions}:
            return version, group, await fresh
        await fresh
    raise AssertionError("no update met running requests")


def test_in_flight_versions_are_recorded_and_new_requests_never_meet_old_keys(model, tmp_path):
    async def run():
        async with meshes_of(model, tmp_path) as meshes:
            version, (_, completions), fresh = await update_under_way(meshes)
            for completion in completions:
                assert (np.diff(completion.versions) >= 0).all()
            # the same prompt is in the prefix cache, as the old weights saw it, and held by running requests
            assert {int(v) for c in fresh[1] for v in c.versions} == {version}
            assert await worst_difference(meshes, fresh) < 1e-4

    asyncio.run(run())


def test_what_the_cache_had_of_a_prompt_is_counted(model, tmp_path):
    async def run():
        async with meshes_of(model, tmp_path) as meshes:
            generator = meshes.generators.replicas[0].leader

            async def counted(tokens, seeds) -> tuple[int, int]:
                await generator.generate.call_one(Request(tokens, seeds, 4, 1.0))
                [found] = await meshes.take_statistics()
                return found.num_prompt_tokens, found.num_cached_tokens

            await sync(meshes, 0)
            prompt, [completion] = await ask(meshes, [1], 40)
            [first] = await meshes.take_statistics()
            assert (first.num_prompt_tokens, first.num_cached_tokens) == (80, 0)
            assert await counted(prompt, [2, 3]) == (160, 128), "whole blocks of 32"
            turn = np.concatenate([prompt, completion.tokens])
            # the last token that was sampled has no keys yet
            assert await counted(turn, [4]) == (len(turn), (len(turn) - 1) // 32 * 32)
            await sync(meshes, 1)
            await meshes.take_statistics()
            assert await counted(prompt, [5]) == (80, 0), "other weights, other keys"

    asyncio.run(run())


def test_recomputed_keys_are_those_of_the_new_weights(model, tmp_path):
    async def run():
        async with meshes_of(model, tmp_path, generator={"kv": "recompute"}) as meshes:
            version, group, fresh = await update_under_way(meshes)
            assert await worst_difference(meshes, fresh) < 1e-4
            assert await worst_difference(meshes, *tokens_of_version(group, version)) < 1e-4

    asyncio.run(run())


def test_drain_lets_running_requests_end_under_their_version(model, tmp_path):
    async def run():
        async with meshes_of(model, tmp_path, generator={"update": "drain"}) as meshes:
            await sync(meshes, 0)
            await learn(meshes, 1)
            await meshes.weights.stage(1)
            running = ask(meshes, list(range(1, 17)), 120)
            await asyncio.sleep(0.05)
            delivery = asyncio.ensure_future(meshes.weights.announce(1))
            later = ask(meshes, [5], 8)
            assert {int(v) for c in (await running)[1] for v in c.versions} == {0}
            await delivery
            assert {int(v) for c in (await later)[1] for v in c.versions} <= {0, 1}

    asyncio.run(run())


def test_a_replica_that_fails_an_update_is_replaced(model, tmp_path):
    """Norms are on both tensor-parallel trainer ranks; a flipped byte in one copy is met by one replica alone."""

    async def run():
        layout, mesh = {"tensor_parallel_degree": 2}, {"step_timeout": 5.0}
        said = []
        tables = dict(generator={"replicas": 2}, parallelism=layout, mesh=mesh)
        async with meshes_of(model, tmp_path, say=said.append, **tables) as meshes:
            await sync(meshes, 0)
            await meshes.weights.stage(1)
            await asyncio.sleep(0.5)  # it is stamped
            flip_a_byte_that_only_one_replica_reads(meshes, replica=1, version=1)
            first = meshes.generators.replicas[1]
            statistics = await meshes.weights.announce(1)
            assert len(statistics) == 1 and meshes.generators.router.healthy == [0]
            await asyncio.wait_for(first.ranks[0].died, 60)
            assert "generator 1 failed weights version 1" in said[0] and "checksum" in said[0]
            flip_a_byte_that_only_one_replica_reads(meshes, replica=1, version=1)  # back again
            router = meshes.generators.router
            await eventually(lambda: router.healthy == [0, 1], "the replacement of generator 1", seconds=120)
            assert meshes.generators.replicas[1] is not first
            versions = [(await r.leader.account.call_one())[0] for r in meshes.generators.replicas.values()]
            assert versions == [1, 1]

    asyncio.run(run())


def flip_a_byte_that_only_one_replica_reads(meshes: Meshes, replica: int, version: int) -> None:
    plan = meshes.weights.link.plan
    mine, others = ({(r.holder, r.block) for r in plan.reads(0, r).reads} for r in (replica, 1 - replica))
    holder, block = min(mine - others)
    handle = meshes.weights.link.regions[holder]
    offset = header_pages(len(handle.blocks)) + version % 2 * handle.slot_bytes + handle.blocks[block][0]
    with open(f"/proc/{handle.pid}/fd/{handle.fd}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 1


def test_a_trainer_rank_killed_in_a_sync_is_named(model, tmp_path):
    """Without recovery it ends the run; test_recovery.py has it repaired."""

    async def run():
        async with meshes_of(model, tmp_path, parallelism={"data_parallel_shard_degree": 2}) as meshes:
            await sync(meshes, 0)
            target = pid_of(meshes, "trainer rank 1")
            os.kill(target, signal.SIGSTOP)  # it will never stage its part
            publishing = asyncio.ensure_future(meshes.weights.link.stage(1))
            delivery = asyncio.ensure_future(meshes.weights.announce(1))
            await asyncio.sleep(0.3)
            assert not delivery.done()
            os.kill(target, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(ActorFault, match="trainer rank 1 died"):
                await delivery
            assert time.monotonic() - start < SUPERVISION_SECONDS
            with pytest.raises(ActorDied, match="trainer rank 1 died while publishing weights version 1"):
                await publishing
            assert (await meshes.generators.replicas[0].leader.account.call_one())[0] == 0

    asyncio.run(run())


ADAPTERS_ALONE = {
    "lora": {"rank": 3, "alpha": 12.0, "sync": "adapter"},
    "parallelism": {"data_parallel_shard_degree": 2},
}


EQUAL_BITS = {"debug": {"batch_invariant": True}}


@pytest.mark.parametrize("tables", [EQUAL_BITS, ADAPTERS_ALONE], ids=["weights", "adapters alone, of two ranks"])
def test_a_generator_rank_killed_in_an_update_leaves_no_mixed_engine(model, tmp_path, tables):
    """With batch-invariant layers one trainer rank has the bits of an engine of two."""
    has_adapters = tables is ADAPTERS_ALONE

    async def run():
        async with meshes_of(model, tmp_path, generator={"tensor_parallel": 2}, **tables) as meshes:
            await sync(meshes, 0)
            replica = meshes.generators.replicas[0]
            await learn(meshes, 1)
            _, fetched, stored = await replica.leader.account.call_one()
            assert fetched < 0.2 * stored if has_adapters else fetched >= stored
            target = pid_of(meshes, "generator 0 rank 1")
            await meshes.weights.stage(1)
            await call_all(replica.ranks, GeneratorEndpoints.fetch(1, 30.0), seconds=30, what="fetching")
            os.kill(target, signal.SIGSTOP)  # both have the bytes, and one will never apply them
            request = GeneratorEndpoints.apply(1)
            applying = asyncio.ensure_future(call(replica.ranks[0], request, seconds=60, what="applying"))
            await asyncio.sleep(0.3)
            assert not applying.done()
            os.kill(target, signal.SIGKILL)
            start, router = time.monotonic(), meshes.generators.router
            # rank 0 is worth nothing alone: it says that the connection is gone, or is ended before it can
            with pytest.raises((ActorDied, ActorError), match="generator 0 rank 0 died|Connection (reset|closed)"):
                await applying
            await eventually(lambda: router.healthy == [], "the end of generator 0", seconds=SUPERVISION_SECONDS)
            assert time.monotonic() - start < SUPERVISION_SECONDS
            await eventually(lambda: router.healthy == [0], "the replacement of generator 0", seconds=120)
            assert meshes.generators.replicas[0] is not replica
            await meshes.weights.announce(1)
            assert await worst_difference(meshes, await ask(meshes, [1], 4)) <= (1e-4 if has_adapters else 0.0)

    asyncio.run(run())


def test_a_trainer_can_be_followed_by_another(model, tmp_path):
    """Generators stay, a trainer of another layout takes over: plans are made anew, whatever they were."""

    async def run():
        async with (
            meshes_of(model, tmp_path) as meshes,
            meshes_of(model, tmp_path, frozenset({"trainer"}), parallelism={"data_parallel_shard_degree": 2}) as second,
        ):
            await sync(meshes, 0)
            await learn(second, 3)
            replicas = list(meshes.generators.replicas.values())
            takeover = WeightLink(second.trainers, "rdma_tcp", 60.0)
            await takeover.connect(replicas)
            assert takeover.transports == "rdma_tcp (2 pairs)"
            await takeover.stage(1)
            assert len(await takeover.announce(1, lambda: replicas, lambda number, reason: None)) == 1
            assert await worst_difference(second, await ask(meshes, [1, 2], 16)) < 1e-4

    asyncio.run(run())


@pytest.mark.rdma
@pytest.mark.skipif(not has_ibverbs(), reason="ibverbs needs an RDMA network card")
def test_weights_travel_over_ibverbs(model, tmp_path):
    async def run():
        async with meshes_of(model, tmp_path, mesh={"transport": "rdma_ibverbs"}) as meshes:
            await learn(meshes, 1)
            await sync(meshes, 0)
            assert meshes.weights.transports == "rdma_ibverbs (1 pair)"
            assert await worst_difference(meshes, await ask(meshes, [1, 2], 16)) < 1e-4

    asyncio.run(run())


def test_experts_of_two_ranks_reach_a_generator_of_two(tmp_path):
    """vLLM packs experts for a CPU when it starts, and must pack them again."""
    path = tmp_path / "model"
    make_tiny(path, seed=1, architecture="qwen3_moe", num_layers=2, tie_word_embeddings=False)

    async def run():
        layout = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
        async with meshes_of(str(path), tmp_path, generator={"tensor_parallel": 2}, parallelism=layout) as meshes:
            await learn(meshes, 1)
            await sync(meshes, 0)
            assert await worst_difference(meshes, await ask(meshes, [1, 2], 16)) < 1e-4

    asyncio.run(run())
