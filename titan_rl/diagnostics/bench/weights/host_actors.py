"""Processes that play hosts for ``titan-rl bench between-hosts``: one stages a version, others take it."""

import os
import socket
import threading
import time

import torch
from monarch.actor import Actor, concurrent_endpoint
from monarch.rdma import RDMAAction, RDMABuffer

from titan_rl.mesh.channel import plan as plan_module
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan, ReadPlan
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.channel.relay.gathering import Fetched, Route
from titan_rl.mesh.channel.relay.memory import RelayHandle
from titan_rl.mesh.channel.tcp import server as server_module
from titan_rl.mesh.channel.tcp.server import Block
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.weights.shards import Shard

_CPU = torch.device("cpu")
_ROW = 1 << 10
_RAW_CHUNK = 1 << 20


class HostActor(Actor):
    """Trainer's or generator's host."""

    @concurrent_endpoint
    async def prepare(self, certificates: dict[str, str], bytes_per_second: float, block_bytes: int) -> None:
        """Set up the host. ``bytes_per_second``: that it sends at most, over all connections; 0: no limit."""
        os.environ.update(certificates)
        plan_module.BLOCK_BYTES = block_bytes
        if bytes_per_second:
            _pace(bytes_per_second)

    @concurrent_endpoint
    async def stage(self, nbytes: int) -> tuple[ReadPlan, RegionHandle, list[RDMABuffer], int]:
        """A plan, and where the version 0 of a model of so many bytes can be read: the region; RDMABuffers of its
        blocks; the port of a raw socket."""
        self.values = torch.randint(0, 100, (nbytes // 4 // _ROW, _ROW), dtype=torch.int32).view(torch.float32)
        shape, interner = tuple(self.values.shape), Interner()
        shards, box = [Shard("weight", shape, (0, 0), self.values)], Box((0, 0), shape)
        needs = interner.units([("", Need("weight", box, "float32"))])
        self.plan = Plan([holdings(shards, interner)], [needs])
        self.writer = WeightWriter(0, shards, self.plan.slot(0), _CPU)
        self.writer.stage(0)
        self.writer.wait()
        slot = self.writer.region.slots[0]
        self.buffers = [RDMABuffer(slot[start:stop]) for start, stop in self.plan.slot(0).blocks]
        handle = self.writer.region.handle(over_rdma=False, over_tcp=True)
        return self.plan.reads(0, 0), handle, self.buffers, self._serve_raw(slot)

    def _serve_raw(self, slot: torch.Tensor) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(slot.numpy().data)

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    @concurrent_endpoint
    async def publish(self, version: int) -> None:
        self.values.view(torch.int32).bitwise_xor_(0x00010001)  # all of it is another, and is sent whole
        self.writer.stage(version)
        self.writer.wait()

    @concurrent_endpoint
    async def bytes_sent(self) -> int:
        return sum(server_module.block_server().bytes_sent.values())

    @concurrent_endpoint
    async def connect(self, plan: ReadPlan, handle: RegionHandle, name: str) -> RelayHandle:
        self.reader = WeightReader(ReaderSetup(plan, [handle], ["tcp"], 0, name), _CPU)
        assert self.reader.relay is not None, "it has a name, so others may take from it"
        return self.reader.relay

    @concurrent_endpoint
    async def fetch(self, version: int, route: Route | None) -> tuple[float, float, Fetched]:
        """Begin and end of a fetch (``time.monotonic``), and what it took."""
        start = time.monotonic()
        fetched = await self.reader.fetch(version, 300.0, route)
        return start, time.monotonic(), fetched

    @concurrent_endpoint
    async def read_rdma(self, buffers: list[RDMABuffer], blocks: list[tuple[int, int]]) -> float:
        """Seconds of all blocks in one request, without a checksum."""
        into, action = self.reader.buffer, RDMAAction()
        start = time.monotonic()
        for buffer, (begin, end) in zip(buffers, blocks, strict=True):
            action.read_remote(into[begin:end], buffer)
        await action.submit(timeout=300)
        return time.monotonic() - start

    @concurrent_endpoint
    async def read_raw(self, port: int) -> float:
        """Seconds of as many bytes over one socket, into memory that is there already; nothing is checked."""
        into = self.reader.buffer.numpy().data
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while into:
                into = into[connection.recv_into(into, min(len(into), _RAW_CHUNK)) :]
        return time.monotonic() - start


def _pace(bytes_per_second: float) -> None:
    """Have this process's server send no faster, as a network card would."""
    server, lock, free = server_module.block_server(), threading.Lock(), [0.0]
    send = server.send_block

    def paced(stream: socket.socket, region: int, block: Block) -> None:
        with lock:
            free[0] = max(free[0], time.monotonic()) + block.nbytes / bytes_per_second
            until = free[0]
        time.sleep(max(until - time.monotonic(), 0.0))
        send(stream, region, block)

    server.send_block = paced
