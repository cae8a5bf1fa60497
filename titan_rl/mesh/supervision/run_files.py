"""Files of a run that processes on other hosts write or read: the run directory itself is the controller's.

What ranks have written on their hosts is collected here, and what they are to read is spread to them. On the
controller's own host all of that is where it should be, and nothing is done.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from pathlib import Path

from titan_rl.mesh.hosts.host_files import bring, fetch
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.deadlines import together
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess

_CHECKPOINTS = "checkpoints/"
"""Which may be in the making, and are collected one by one."""


async def spread(processes: Iterable[ActorProcess], *paths: HostPath) -> None:
    """Copy folders to the hosts of these processes. Errors: ActorDied if one of those is lost."""
    await together(
        _on(process, bring(process.host.remote_agent, Path(path), path.at(process.host.paths)))
        for process in _one_a_host(processes)
        for path in paths
        if path
    )


async def collect(processes: Iterable[ActorProcess], *paths: HostPath) -> None:
    """Move files that processes wrote below these folders to this host. Errors: ActorDied, as above."""
    for path in filter(None, paths):
        for process in _one_a_host(processes):  # one after the other: they may hold the same files
            agent, there = process.host.remote_agent, path.at(process.host.paths)
            await _on(process, fetch(agent, there, Path(path), leaving=_CHECKPOINTS))
            await _on(process, agent.remove.call_one(there, _CHECKPOINTS))


def _one_a_host(processes: Iterable[ActorProcess]) -> list[ActorProcess]:
    return list({process.host: process for process in processes if process.host.is_remote}.values())


async def _on(process: ActorProcess, work: Awaitable[None]) -> None:
    """What an agent is asked for, unless its host is lost meanwhile."""

    async def wait() -> None:
        await work

    doing = asyncio.ensure_future(wait())
    doing.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait({doing, process.host.died}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ActorDied([process], "files of the run were carried")
        doing.result()
    finally:
        doing.cancel()
