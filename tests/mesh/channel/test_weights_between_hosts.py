"""Weights between real actors whose processes count as those of several hosts: each worker loop is one."""

import asyncio
import itertools
import os
import signal
from contextlib import contextmanager
from functools import partial

import pytest
from started_meshes import ask, learn, meshes_of, pid_of, worst_difference
from waiting import eventually

from titan_rl.mesh.channel.tcp.client import IDLE_SECONDS
from titan_rl.mesh.launch.local import LocalLauncher
from titan_rl.mesh.resources.host_identity import HOST_ID
from titan_rl.mesh.resources.network import HOST_ADDRESS
from titan_rl.models.builtin.tiny import make_tiny

pytestmark = pytest.mark.slow
GENERATORS = 4


@contextmanager
def hosts_of_their_own():
    """Worker loops that are started now; the controller serves their batches."""
    numbers, launch = itertools.count(), LocalLauncher.launch

    def launched(self, command, *, environment, output):
        apart = environment | {HOST_ID: f"host {next(numbers)}"}
        return launch(self, command, environment=apart, output=output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalLauncher, "launch", launched)
        patch.setenv(HOST_ADDRESS, "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    return str(path)


def raise_it(number: int, reason: str) -> None:
    raise AssertionError(f"generator {number} {reason}")


def test_trainers_send_once_to_any_number_of_hosts_and_a_death_among_them_is_survived(model, tmp_path):
    """One mesh for all of it, since to start it takes longest."""
    told = []

    async def run():
        tables = {"generator": {"replicas": GENERATORS}, "mesh": {"worker_loops": GENERATORS + 1, "step_timeout": 60.0}}
        with hosts_of_their_own():
            async with meshes_of(model, tmp_path, **tables) as meshes:
                link = meshes.weights.link
                link._tell = lambda kind, **fields: told.append((kind, fields))
                assert "handed on between" in link.transports, link.transports
                version = await count_bytes(meshes, link)
                await kill_one_that_hands_on(meshes, link, version + 1)

    asyncio.run(run())


async def count_bytes(meshes, link) -> int:
    """With 1, 2 and 4 generators taking part."""
    replicas = list(meshes.generators.replicas.values())
    relays = [r for r in replicas if link.routes._seats[r][0].relay is not None]
    _, nbytes, _ = await relays[0].leader.account.call_one()
    version = 0
    for count in (1, 2, len(relays)):
        version += 1
        await learn(meshes, version)
        await link.stage(version)
        statistics = await link.announce(version, partial(list, relays[:count]), raise_it)
        assert sum(one.bytes_from_trainers for one in statistics) == nbytes
        assert sum(one.bytes_from_generators for one in statistics) == (count - 1) * nbytes
    version += 1
    await link.stage(version)
    await meshes.weights.announce(version)
    for replica in replicas:
        assert await worst_difference(meshes, await ask(meshes, [1, 2], 8, replica.number)) < 1e-4
    return version


async def kill_one_that_hands_on(meshes, link, version: int) -> None:
    """It is stopped, so it never begins the version, and then killed: those below it take what it owes from the
    trainers, and its replacement takes the version from the others."""
    replicas = list(meshes.generators.replicas.values())
    relays = [r for r in replicas if link.routes._seats[r][0].relay is not None]
    await learn(meshes, version)
    await meshes.weights.stage(version)
    root = relays[0]
    pid = pid_of(meshes, root.ranks[0].name)
    delivery = asyncio.ensure_future(meshes.weights.announce(version))
    os.kill(pid, signal.SIGKILL)
    statistics = await asyncio.wait_for(delivery, 60 + IDLE_SECONDS)
    assert {one.generator for one in statistics} >= {r.number for r in replicas} - {root.number}
    router = meshes.generators.router
    await eventually(lambda: len(router.healthy) == GENERATORS, "the replacement of the killed generator", seconds=120)
    versions = [(await r.leader.account.call_one())[0] for r in meshes.generators.replicas.values()]
    assert versions == [version] * GENERATORS
    for replica in meshes.generators.replicas.values():
        assert await worst_difference(meshes, await ask(meshes, [3], 8, replica.number)) < 1e-4
