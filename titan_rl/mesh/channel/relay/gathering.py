"""Blocks of a version for one rank, fetched from trainers and relayed at once.

A relaying process that dies, fails, is silent or does not begin in time is bypassed: missing blocks are taken
from the trainers, and the caller is told. No thread is left behind: one that wrote later would spoil the next version.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from titan_rl.mesh.channel.memory.region import version_of
from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.relay.memory import RelayHandle, RelayView
from titan_rl.mesh.channel.relay.trees import stripes
from titan_rl.mesh.channel.sources import Tcp, TornRead, VersionUnavailable
from titan_rl.mesh.channel.tcp.client import BlockClient, Done, Refused, Version, WrongBlock, dealt, streams_each
from titan_rl.mesh.channel.tcp.protocol import Status
from titan_rl.mesh.channel.transports import Transport
from titan_rl.mesh.resources.background_thread import compute_alone

_PAUSE_SECONDS = 0.5
"""Before a trainer that could not be reached is asked again."""


@dataclass(frozen=True)
class Parent:
    """Peer rank with the same bytes, and its transport."""

    handle: RelayHandle
    transport: Transport


@dataclass(frozen=True)
class Route:
    """Sources of one rank for a version."""

    epoch: int
    """Of the trainer's regions that the version is in."""
    parents: tuple[Parent | None, ...] = (None,)
    """For each stripe (trees.py); None: the trainers."""


@dataclass
class Fetched:
    """Bytes fetched over the network by one rank; those from its own host are not counted."""

    bytes_from_trainers: int = 0
    bytes_from_generators: int = 0
    fallbacks: list[str] = field(default_factory=list)
    """Parents that did not deliver, each with its reason; trainers were read instead."""


class Unreachable(TornRead):
    """Unreachable trainer rank; a retry may succeed."""


async def ended(*works: Awaitable) -> None:
    """Wait for all, whatever some raise. Errors: VersionUnavailable if one raised that; else the first error."""
    errors = [one for one in await asyncio.gather(*works, return_exceptions=True) if one is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, VersionUnavailable)):
        raise error


async def take_over_streams(
    source: BlockClient | RelayView,
    version: Version,
    reads: Sequence[Read],
    buffer: torch.Tensor,
    done: Done,
    count: int,
) -> None:
    """Read blocks over ``count`` threads and connections. Errors: those of ``BlockClient.take``."""
    shares = dealt(reads, count)
    if not shares:
        return
    pool, loop = ThreadPoolExecutor(len(shares), "blocks", compute_alone), asyncio.get_running_loop()
    try:
        works = (loop.run_in_executor(pool, source.take, version, share, buffer, done) for share in shares)
        await ended(*works)
    finally:
        pool.shutdown(wait=False)


async def take_from_trainer(
    source: Tcp, version: Version, reads: Sequence[Read], buffer: torch.Tensor, done: Done, count: int
) -> None:
    """Read blocks from a trainer over TCP. Errors: VersionUnavailable; TornRead; Unreachable."""
    name, number = source.name, version_of(version.stamp)
    try:
        await take_over_streams(source.client, version, reads, buffer, done, count)
    except WrongBlock as error:
        raise TornRead(f"block {error.read.block} of {name} fails its checksum") from error
    except Refused as error:
        if error.status is Status.LATE:
            raise TornRead(f"{name} has not finished version {number}") from error
        if error.stamp > version.stamp:
            raise VersionUnavailable(
                f"{name} has version {version_of(error.stamp)} where {number} was asked for"
            ) from error
        raise VersionUnavailable(f"{name} failed to stage version {number}, or began anew") from error
    except OSError as error:
        await asyncio.sleep(_PAUSE_SECONDS)
        raise Unreachable(f"{name} cannot be reached: {error}") from error


class Parents:
    """The ranks that one rank takes blocks from, by the stripes of its plan."""

    def __init__(self, reads: Sequence[Read]):
        self._stripe_of = stripes([read.nbytes for read in reads])
        self._views: dict[RelayHandle, RelayView] = {}

    def shares(self, route: Route, missing: Sequence[int]) -> dict[Parent | None, list[int]]:
        """Blocks by parent (None: trainers), as places in the plan."""
        places: dict[Parent | None, list[int]] = {None: []}
        for place in missing:
            parent = route.parents[self._stripe_of[place] % len(route.parents)]
            places.setdefault(parent, []).append(place)
        return places

    async def take(
        self,
        parent: Parent,
        version: Version,
        reads: Sequence[Read],
        buffer: torch.Tensor,
        done: Done,
        fetched: Fetched,
        others: Callable[[], Awaitable[None]],
    ) -> None:
        """Read from a parent, with ``others`` as fallback. Errors: those of ``others``."""
        source = None
        try:
            source = self._open(parent)
            count = streams_each(2) if isinstance(source, BlockClient) else 1
            await take_over_streams(source, version, reads, buffer, done, count)
        except (OSError, Refused, WrongBlock) as error:
            if time.monotonic() > version.deadline:
                raise TornRead(f"{parent.handle.name} did not hand on all of the version: {error}") from error
            fetched.fallbacks.append(
                f"{parent.handle.name} was left, for the trainers: {type(error).__name__}: {error}"
            )
            await others()
        finally:
            if isinstance(source, BlockClient):
                fetched.bytes_from_generators += source.bytes_received

    def _open(self, parent: Parent) -> BlockClient | RelayView:
        """Errors: OSError if a process of this host is gone."""
        if parent.transport == "tcp":
            return BlockClient(parent.handle.tcp)
        if parent.handle not in self._views:
            self._views = {parent.handle: RelayView(parent.handle)}
        return self._views[parent.handle]
