"""A generator rank's side of the weight channel: it fetches the bytes that it stores of a version.

It accepts only what stamp and checksum confirm. Over TCP they come with each block; elsewhere they are looked at in the
trainers' headers, before the blocks are read and again after. A rank that is a relay lets others take what it has
(relay/).
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from titan_rl.mesh.channel.memory.region import (
    FAILED,
    NUM_SLOTS,
    RegionHandle,
    epoch_of,
    is_unavailable,
    stamp_of,
    version_of,
)
from titan_rl.mesh.channel.plan import Box, Read, ReadPlan
from titan_rl.mesh.channel.relay.gathering import (
    Fetched,
    Parent,
    Parents,
    Route,
    Unreachable,
    ended,
    take_from_trainer,
)
from titan_rl.mesh.channel.relay.memory import Relay, RelayHandle
from titan_rl.mesh.channel.sources import (
    Polled,
    Rdma,
    Source,
    Tcp,
    TornRead,
    VersionUnavailable,
    open_source,
    share_out,
)
from titan_rl.mesh.channel.tcp.client import Held, Version, streams_each
from titan_rl.mesh.channel.transports import ON_GPU, Transport
from titan_rl.mesh.channel.writer import piece_view
from titan_rl.mesh.resources.background_thread import in_side_thread
from titan_rl.mesh.resources.released_memory import drop_contents

_HOST = torch.device("cpu")
_FIRST_POLL, _LAST_POLL = 0.0005, 0.02
"""Seconds between two looks at a version that is not there yet."""


@dataclass(frozen=True)
class ReaderSetup:
    """Setup of a generator rank's reader."""

    plan: ReadPlan
    regions: list[RegionHandle]
    """Of the holders that it reads from."""
    transports: list[Transport]
    """One for each region."""
    epoch: int = 0
    """In which the regions were opened."""
    relay: str = ""
    """If other ranks may take versions from this one: the name of its process, for them."""
    adapter_scale: float | None = None
    """Of the adapters that come instead of weights (generator/weights/adapter_reader.py); None: weights come."""


class WeightReader:
    """Reader of one generator rank: fetches its bytes of a version while the engine runs."""

    def __init__(self, setup: ReaderSetup, device: torch.device, threads: int = 1):
        self.plan, self._threads = setup.plan, threads
        device = device if all(transport in ON_GPU for transport in setup.transports) else _HOST
        self._sources = {
            handle.rank: open_source(handle, transport, device)
            for handle, transport in zip(setup.regions, setup.transports, strict=True)
        }
        self._relay, self.epoch = Relay(self.plan, setup.relay) if setup.relay else None, setup.epoch
        self._parents = Parents(self.plan.reads)
        zeros = partial(torch.zeros, self.plan.nbytes, dtype=torch.uint8, device=device)
        self.buffer = zeros() if self._relay is None else self._relay.data
        self.held: int | None = None
        """The version in ``buffer``; None while that holds no complete one."""
        self._is_closed = False
        self.bytes_read = 0
        """In all fetches so far."""

    @property
    def relay(self) -> RelayHandle | None:
        """Handle of this rank's relay, for other ranks; None if it is none."""
        return None if self._relay is None else self._relay.handle

    async def fetch(self, version: int, timeout: float, route: Route | None = None) -> Fetched:
        """Fetch a version. One that is being written is waited for; what fails its checksum is read again.

        ``route``: from whom; by default from the trainers. Errors: TornRead if it was superseded, is of another epoch,
        or is still not complete after ``timeout`` seconds.
        """
        route, fetched, before = route or Route(self.epoch), Fetched(), self._bytes_received()
        if route.epoch != self.epoch:
            raise VersionUnavailable(
                f"version {version} is of epoch {route.epoch}, and the trainers known here are of {self.epoch}"
            )
        stamp = stamp_of(self.epoch, version)
        target = Version(stamp, version % NUM_SLOTS, time.monotonic() + timeout, self._held_for(stamp))
        if self._relay is not None:
            self._relay.begin(stamp)
        try:
            if any(isinstance(source, Tcp) for source in self._sources.values()):
                self._overwrite()
            # all stripes at once, each repeated by itself: what another host lacks may depend on one alone
            shares = self._parents.shares(route, range(len(self.plan.reads)))
            by_parent = {parent: places for parent, places in shares.items() if parent is not None}
            handed = (self._from_parent(parent, target, places, fetched) for parent, places in by_parent.items())
            await ended(self._from_trainers(shares[None], target), *handed)
        except BaseException:
            self._fail(stamp)
            raise
        finally:
            fetched.bytes_from_trainers = self._bytes_received() - before
        self.bytes_read += sum(read.nbytes for read in self.plan.reads)
        self.held = version
        return fetched

    def _held_for(self, stamp: int) -> Held | None:
        """What the buffer holds, of which a version with this stamp may come as a difference."""
        if self.held is None:
            return None
        relay, held = self._relay, stamp_of(self.epoch, self.held)
        place_of = {read.into: place for place, read in enumerate(self.plan.reads)}

        def keep(read: Read, changes: bytes) -> None:
            if relay is not None:
                relay.keep(place_of[read.into], held, stamp, changes)

        return Held(held, set(place_of), keep)

    def _bytes_received(self) -> int:
        """Over TCP from trainers, ever."""
        return sum(source.client.bytes_received for source in self._sources.values() if isinstance(source, Tcp))

    def _overwrite(self) -> None:
        """``buffer`` holds no complete version from here on."""
        self.held = None
        if (storage := self.buffer.untyped_storage()).nbytes() < self.plan.nbytes:
            storage.resize_(self.plan.nbytes)

    async def _await_stamps(self, target: Version, sources: Iterable[Source], at_once: bool = False) -> None:
        deadline, version = (time.monotonic() if at_once else target.deadline), version_of(target.stamp)
        pause = _FIRST_POLL
        for source in sources:
            rank = source.handle.rank
            while not isinstance(source, Tcp):
                await source.refresh(max(deadline - time.monotonic(), 1.0))
                stamp = int(source.header.stamps[target.slot])
                if stamp == target.stamp:
                    break
                if self._is_closed:
                    raise VersionUnavailable("the trainer has begun anew")
                if stamp == FAILED:
                    raise VersionUnavailable(f"trainer rank {rank} failed to stage version {version}, or began anew")
                if source.is_gone():
                    raise VersionUnavailable(f"trainer rank {rank} is gone")
                if is_unavailable(stamp, target.stamp):
                    raise VersionUnavailable(
                        f"trainer rank {rank} has version {_describe_stamps(stamp, target.stamp)} was asked for"
                    )
                if time.monotonic() >= deadline:
                    raise TornRead(f"trainer rank {rank} has not finished version {version}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_POLL)

    async def _from_parent(self, parent: Parent, target: Version, places: list[int], fetched: Fetched) -> None:
        reads = [dataclasses.replace(r, block=p, offset=r.into) for p, r in self._planned(places)]

        async def others() -> None:
            await self._from_trainers(places, target)

        done = partial(self._put, target.stamp)
        await self._parents.take(parent, target, reads, self.buffer, done, fetched, others)

    def _planned(self, places: Iterable[int]) -> list[tuple[int, Read]]:
        return [(place, self.plan.reads[place]) for place in places]

    def _put(self, stamp: int, read: Read, checksum: int) -> None:
        if self._relay is not None:
            self._relay.put(read.block, stamp, checksum)

    async def _from_trainers(self, places: list[int], target: Version) -> None:
        """Read missing blocks, with retries. Errors: TornRead."""
        while True:
            try:
                return await self._read_from_trainers([p for p in places if not self._has(p, target.stamp)], target)
            except VersionUnavailable:
                self._fail(target.stamp)  # at once: another host may wait for this one, and this one for that
                raise
            except TornRead as error:
                if time.monotonic() > target.deadline or (self._is_closed and isinstance(error, Unreachable)):
                    raise

    def _has(self, place: int, stamp: int) -> bool:
        return self._relay is not None and self._relay.has(place, stamp)

    def _fail(self, stamp: int) -> None:
        """Whoever waits for it here must not go on doing so."""
        if self._relay is not None:
            self._relay.fail(stamp)

    async def _read_from_trainers(self, places: list[int], target: Version) -> None:
        by_source: dict[Source, list[tuple[int, Read]]] = {}
        for place, read in self._planned(places):
            by_source.setdefault(self._sources[read.holder], []).append((place, read))
        remote = {source: reads for source, reads in by_source.items() if isinstance(source, Tcp)}
        near = [(source, *one) for source, reads in by_source.items() if not isinstance(source, Tcp) for one in reads]
        count = streams_each(len(remote))
        asks = (self._from_trainer(source, reads, target, count) for source, reads in remote.items())
        await ended(self._copy_mapped(near, target), *asks)

    async def _from_trainer(self, source: Tcp, reads: list[tuple[int, Read]], target: Version, count: int) -> None:
        place_of = {read: place for place, read in reads}

        def done(read: Read, checksum: int) -> None:
            if self._relay is not None:
                self._relay.put(place_of[read], target.stamp, checksum)

        await take_from_trainer(source, target, [read for _, read in reads], self.buffer, done, count)

    def let_go(self) -> None:
        """Release the buffer until the next fetch."""
        self.held = None
        if self._relay is not None:
            self._relay.let_go()
            return
        storage = self.buffer.untyped_storage()
        if self.buffer.device.type != "cpu":
            storage.resize_(0)
        elif not self.buffer.is_pinned():  # others have views of its address
            drop_contents(storage)

    def close(self) -> None:
        """Stop serving; ranks that wait for a version here fail over."""
        self._is_closed = True
        if self._relay is not None:
            self._relay.close()

    async def _copy_mapped(self, near: list[tuple[Polled, int, Read]], target: Version) -> None:
        """Blocks of regions whose header tells when they are there."""
        reads, slot = [(source, read) for source, _, read in near], target.slot
        sources = dict.fromkeys(source for source, _ in reads)
        await self._await_stamps(target, sources)
        if sources:
            self._overwrite()
        remote = [(source, read) for source, read in reads if isinstance(source, Rdma)]
        for source in dict.fromkeys(source for source, _ in remote):
            timeout = max(target.deadline - time.monotonic(), 1.0)
            await source.fetch(slot, [read for s, read in remote if s is source], self.buffer, timeout)

        def work(share: list[tuple[Polled, Read]]) -> None:
            for source in dict.fromkeys(source for source, _ in share):
                source.take(slot, [read for s, read in share if s is source], self.buffer)

        await asyncio.gather(*(in_side_thread(work, share) for share in share_out(reads, self._threads)))
        await self._await_stamps(target, sources, at_once=True)
        if self._relay is not None:
            for source, place, read in near:
                self._relay.put(place, target.stamp, int(source.header.checksums[slot, read.block]))

    def pieces(self) -> Iterator[tuple[str, Box, Box, torch.Tensor]]:
        """Fetched pieces: (tensor name, box of the need, own box, values)."""
        for base, segment in self.plan.segments:
            for placed in segment.placed():
                yield placed.name, placed.piece.need, placed.piece.box, piece_view(self.buffer, base, placed)


def _describe_stamps(stamp: int, target: int) -> str:
    """Held and requested version for a message, with epochs where they differ."""
    if epoch_of(stamp) == epoch_of(target):
        return f"{version_of(stamp)} where {version_of(target)}"
    return f"{version_of(stamp)} of epoch {epoch_of(stamp)} where {version_of(target)} of epoch {epoch_of(target)}"
