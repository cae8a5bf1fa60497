"""A weight version is read completely or not at all. One process plays both sides, over a shared mapping."""

import asyncio
import dataclasses
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from titan_rl.mesh.channel.memory import pinned, slots
from titan_rl.mesh.channel.memory import region as region_module
from titan_rl.mesh.channel.memory.checksums import checksums, sums_for
from titan_rl.mesh.channel.memory.region import NUM_SLOTS, WRITING, Region, header_pages
from titan_rl.mesh.channel.memory.slots import SlotWriter, lower_priority
from titan_rl.mesh.channel.memory.streams import NoStream, stream_for
from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan, Read
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.channel.sources import SharedMemory, TornRead, share_out
from titan_rl.mesh.channel.transports import Place, choose_transport, describe, from_host, staged_on_host
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.weights.shards import Shard

CPU = torch.device("cpu")
SHAPES = {"embed": (7, 5), "norm": (3,), "cube": (2, 3, 4)}


def values_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


class Channel:
    """Trainer ranks that split every tensor by rows, and one reader of all; each version holds other values."""

    def __init__(self, ranks: int = 1, dtype: str = "float32"):
        self.parameters = values_of(0)
        interner = Interner()
        shards = [self.rows(rank, ranks) for rank in range(ranks)]
        needs = interner.units(("", Need(name, whole(shape), dtype)) for name, shape in SHAPES.items())
        self.plan = Plan([holdings(held, interner) for held in shards], [needs])
        self.writers = [WeightWriter(rank, held, self.plan.slot(rank), CPU) for rank, held in enumerate(shards)]
        self.handles = [writer.region.handle(over_rdma=False) for writer in self.writers]
        self.reader = WeightReader(ReaderSetup(self.plan.reads(0, 0), self.handles, ["shared_memory"] * ranks), CPU)

    def rows(self, rank: int, ranks: int) -> list[Shard]:
        shards, parameters = [], self.parameters
        for name, shape in SHAPES.items():
            parts = parameters[name].chunk(ranks)
            if rank < len(parts):
                start = sum(len(part) for part in parts[:rank])
                shards.append(Shard(name, shape, (start,) + (0,) * (len(shape) - 1), parts[rank]))
        return shards

    def publish(self, version: int) -> None:
        for name, values in values_of(version).items():
            self.parameters[name].copy_(values)
        for writer in self.writers:
            writer.stage(version)

    def fetch(self, version: int, timeout: float = 5) -> dict[str, torch.Tensor]:
        asyncio.run(self.reader.fetch(version, timeout))
        got = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        for name, need, box, values in self.reader.pieces():
            got[name][box.within(need)] = values.float()
        return got

    def scribble(self, rank: int, version: int, offset: int) -> None:
        handle = self.handles[rank]
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[header_pages(len(handle.blocks)) + version % 2 * handle.slot_bytes + offset] ^= 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_arrive_as_they_were_cast(ranks, dtype):
    channel = Channel(ranks, dtype)
    for version in range(4):
        channel.publish(version)
        got = channel.fetch(version)
        for name, tensor in values_of(version).items():
            assert torch.equal(got[name], tensor.to(getattr(torch, dtype)).float()), name
        assert channel.reader.held == version


def test_what_was_fetched_stays_while_the_next_is_staged():
    channel = Channel()
    channel.publish(1)
    before = channel.fetch(1)
    channel.publish(2)
    channel.publish(3)
    again = {name: values.clone() for name, _, _, values in channel.reader.pieces()}
    assert all(torch.equal(before[name], again[name]) for name in SHAPES)


def test_of_two_versions_the_last_is_kept_and_the_other_gives_its_memory_back(monkeypatch):
    monkeypatch.setitem(SHAPES, "embed", (64, 64))  # some pages
    channel = Channel()
    [writer] = channel.writers
    channel.publish(1)
    channel.publish(2)
    writer.wait()
    held = os.stat(channel.handles[0].fd).st_blocks
    writer.drop_old_versions()
    assert os.stat(channel.handles[0].fd).st_blocks < held
    with pytest.raises(TornRead, match="failed to stage version 1"):
        channel.fetch(1)
    for version in (2, 3):
        if version == 3:
            channel.publish(3)
        got = channel.fetch(version)
        assert all(torch.equal(got[name], values) for name, values in values_of(version).items())


def test_a_flipped_byte_is_seen():
    channel = Channel(ranks=2)
    channel.publish(1)
    for writer in channel.writers:
        writer.wait()
    channel.scribble(1, 1, 0)
    with pytest.raises(TornRead, match="rank 1 fails its checksum"):
        channel.fetch(1, timeout=0.2)
    assert channel.reader.held is None


def test_a_torn_read_is_read_again():
    channel = Channel()
    channel.publish(1)
    channel.writers[0].wait()
    channel.scribble(0, 1, 0)
    repair = threading.Timer(0.2, channel.scribble, (0, 1, 0))
    repair.start()
    got = channel.fetch(1)
    repair.join()
    assert all(torch.equal(got[name], values) for name, values in values_of(1).items())


def test_a_version_that_is_being_written_is_waited_for(monkeypatch):
    channel = Channel()
    channel.publish(1)
    channel.writers[0].wait()
    stamps, held = channel.writers[0].region.header.stamps, []
    stamps[1] = WRITING

    async def look(source, timeout: float) -> None:
        """The writer is done when the reader has looked twice."""
        held.append(channel.reader.held)
        if len(held) == 3:
            stamps[1] = 1

    monkeypatch.setattr(SharedMemory, "refresh", look)
    got = channel.fetch(1)
    assert held == [None] * 4, "two looks in vain, one that finds the version, one after the blocks were read"
    assert all(torch.equal(got[name], values) for name, values in values_of(1).items())


def test_a_version_that_never_comes_is_an_error_by_name():
    channel = Channel(ranks=2)
    channel.publish(1)
    with pytest.raises(TornRead, match="trainer rank 0 has not finished version 2"):
        channel.fetch(2, timeout=0.1)


def test_the_version_before_the_one_that_is_wanted_is_not_taken_for_it():
    """Both have their turn in the same slot."""
    channel = Channel()
    channel.publish(1)
    with pytest.raises(TornRead, match="trainer rank 0 has not finished version 3"):
        channel.fetch(3, timeout=0.1)
    assert channel.reader.held is None


def test_one_rank_behind_makes_the_version_invisible():
    channel = Channel(ranks=2)
    channel.writers[0].stage(1)
    with pytest.raises(TornRead, match="rank 1"):
        channel.fetch(1, timeout=0.1)


def test_a_superseded_version_is_refused_at_once():
    channel = Channel()
    for version in (1, 2, 3):
        channel.publish(version)
    with pytest.raises(TornRead, match="version 3 where 1 was asked for"):
        channel.fetch(1, timeout=60)


def test_bytes_are_counted():
    channel = Channel(ranks=2)
    channel.publish(0)
    channel.fetch(0)
    needed = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    assert channel.reader.bytes_read == needed


@pytest.mark.parametrize("kind", ["xxh3", "weighted"])
def test_checksums_see_any_byte_and_any_swap(kind):
    """The GPU's as well, whose reference is plain torch."""
    data = torch.arange(1003, dtype=torch.int32).view(torch.uint8)[:-1].clone()

    def digest(of: torch.Tensor) -> int:
        [whole, part] = checksums(kind, of, [(0, len(of)), (0, 16)]).tolist()
        assert part == checksums(kind, of[:16].clone(), [(0, 16)])
        return whole

    first = digest(data)
    assert 0 <= first < 1 << 64
    for place in (0, 1, 500, len(data) - 1):
        data[place] += 1
        assert digest(data) != first
        data[place] -= 1
    swapped = data.clone()
    swapped[:4], swapped[4:8] = data[4:8], data[:4]
    assert digest(swapped) != first and digest(data) == first


def test_what_was_staged_on_a_gpu_is_checked_alike_in_host_memory(monkeypatch):
    """The kind of a checksum is the region's, and not that of the buffer that is read into."""
    assert sums_for(CPU) == "xxh3" and sums_for(torch.device("cuda:1")) == "weighted"
    monkeypatch.setattr(region_module, "sums_for", lambda device: "weighted")
    channel = Channel()
    [writer], [handle] = channel.writers, channel.handles
    on_gpu = dataclasses.replace(handle, cuda=[(lambda slot=slot: slot, ()) for slot in writer.region.slots])
    channel.reader = WeightReader(ReaderSetup(channel.plan.reads(0, 0), [on_gpu], ["cuda_ipc"]), CPU)
    channel.publish(1)
    got = channel.fetch(1)
    assert all(torch.equal(got[name], tensor) for name, tensor in values_of(1).items())
    channel.scribble(0, 1, 0)
    with pytest.raises(TornRead, match="block 0 of trainer rank 0 fails its checksum"):
        channel.fetch(1, timeout=0.1)


def test_a_way_that_does_not_reach_the_slots_is_an_error_in_words():
    channel = Channel()
    with pytest.raises(ValueError, match="rank 0 stages its weights in its host's memory, which cuda_ipc does not"):
        WeightReader(ReaderSetup(channel.plan.reads(0, 0), channel.handles, ["cuda_ipc"]), CPU)
    on_gpu = [dataclasses.replace(channel.handles[0], cuda=["a slot"])]
    with pytest.raises(ValueError, match="on its GPU, which shared_memory does not reach"):
        WeightReader(ReaderSetup(channel.plan.reads(0, 0), on_gpu, ["shared_memory"]), CPU)


def test_a_gpu_s_weights_are_staged_on_the_host_where_some_reader_reaches_nothing_else():
    """Also if all readers were to take shared memory, and by those of them that could take CUDA IPC."""
    used = [(0, "cuda_ipc"), (1, "cuda_ipc"), (1, "shared_memory"), (2, "rdma_ibverbs"), (3, "rdma_tcp")]
    assert staged_on_host(used) == {1, 3}
    assert from_host("cuda_ipc") == "shared_memory" and from_host("rdma_ibverbs") == "rdma_ibverbs"
    meta = torch.device("meta")
    shards = [Shard("norm", (3,), (0,), torch.zeros(3, device=meta))]
    interner = Interner()
    plan = Plan([holdings(shards, interner)], [interner.units([("", Need("norm", whole((3,)), "float32"))])])
    slots_of = {on_host: WeightWriter(0, shards, plan.slot(0), meta, on_host).region.slots for on_host in (False, True)}
    assert [slots_of[on_host][0].device for on_host in (False, True)] == [meta, CPU]


class RecordedStream(NoStream):
    """Says what it was asked for, by which thread, and within what."""

    is_asynchronous = True

    def __init__(self, log: list):
        self.log, self.beside = log, threading.current_thread()

    def note(self, what: str) -> None:
        self.log.append(what if threading.current_thread() is not self.beside else f"{what} beside")

    def follow(self):
        self.note("follow")

    @contextmanager
    def running(self):
        self.note("[")
        yield
        self.note("]")

    def mark(self):
        self.note("mark")

    def precede(self):
        self.note("precede")

    def synchronize(self):
        self.note("synchronize")


def test_copies_run_in_a_stream_of_their_own_and_events_hold_the_order(monkeypatch):
    """After what training has asked for, before what it asks for next, and bytes are summed when they are there."""
    log, region = [], Region(0, 64, [(0, 32), (32, 64)], CPU)
    monkeypatch.setattr(slots, "_copy", lambda copies, non_blocking: log.append(f"copy, non_blocking={non_blocking}"))

    def summed(kind, data, blocks):
        log.append(f"{len(blocks)} sums")
        return checksums(kind, data, blocks)

    monkeypatch.setattr(slots, "checksums", summed)
    writer = SlotWriter(region, [[]] * NUM_SLOTS, RecordedStream(log))
    writer.begin(1, 1, before_stamp=lambda: log.append("small"))
    writer.wait()
    writer.wait_until_copied()
    copied = ["[", "copy, non_blocking=True", "mark", "]"]
    assert log == ["follow beside", *copied, "small", "synchronize", "[", "2 sums", "]", "precede beside"]
    assert region.header.stamps[1] == 1


def test_a_gpu_s_stream_waits_and_is_waited_for_by_events(monkeypatch):
    """No thread waits, unless it reads the bytes; and training waits for the copies alone, not for their sums."""
    log, gpu = [], torch.device("cuda:1")

    class FakeStream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for all of {other.name}")

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

        def record_event(self):
            log.append(f"{self.name}: an event")
            return "it"

        def synchronize(self):
            log.append(f"a thread waits for {self.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(f"own on {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(f"training's on {device}"))
    stream = stream_for(CPU, gpu)
    stream.precede()
    assert log == [] and stream.is_asynchronous, "nothing was copied yet"
    stream.follow()
    stream.mark()
    stream.precede()
    stream.synchronize()
    assert log == [
        "own on cuda:1 waits for all of training's on cuda:1",
        "own on cuda:1: an event",
        "training's on cuda:1 waits for it",
        "a thread waits for own on cuda:1",
    ]


def test_a_gpus_slots_lie_in_segments_that_cuda_ipc_maps(monkeypatch):
    """A device without memory stands for a GPU."""
    log, zeros = [], torch.zeros

    @contextmanager
    def fixed_segments():
        log.append("fixed")
        yield
        log.append("as before")

    def taken(*size, device, **keywords):
        log.append(f"{size[0]} bytes on {device}")
        return zeros(*size, device=device, **keywords)

    monkeypatch.setattr(region_module, "fixed_segments", fixed_segments)
    monkeypatch.setattr(region_module.torch, "zeros", taken)
    Region(0, 64, [(0, 64)], torch.device("meta"))
    assert log == ["fixed", *["64 bytes on meta"] * NUM_SLOTS, "as before"]


def test_host_memory_that_a_gpu_fills_is_pinned_once_and_as_long_as_it_is_there(monkeypatch):
    log = []
    monkeypatch.setattr(pinned, "pin_memory", lambda at, size: log.append(("pin", at, size)))
    monkeypatch.setattr(pinned, "unpin_memory", lambda at: log.append(("unpin", at)))
    Region(0, 64, [(0, 64)], CPU)
    Region(0, 64, [(0, 64)], CPU, filled_from=CPU)
    assert not log
    region = Region(0, 64, [(0, 64)], CPU, filled_from=torch.device("cuda:1"))
    [(what, at, size)] = log
    assert what == "pin" and at % mmap.PAGESIZE == 0
    assert at < region.slots[0].data_ptr() and region.slots[1].data_ptr() + 64 == at + size
    del region
    assert log[1:] == [("unpin", at)]


def test_host_memory_that_cannot_be_pinned_will_do(monkeypatch, capsys):
    def refuses(at: int, size: int) -> None:
        raise RuntimeError("Registering memory failed with cudaError: 2.")

    monkeypatch.setattr(pinned, "pin_memory", refuses)
    region = Region(0, 64, [(0, 64)], CPU, filled_from=torch.device("cuda:1"))
    assert len(region.slots) == NUM_SLOTS
    assert "could not be pinned, copies will be slower" in capsys.readouterr().out


def test_a_cpu_has_no_streams():
    assert type(stream_for(CPU, CPU)) is NoStream and not NoStream.is_asynchronous


def test_work_is_shared_out_by_bytes():
    reads = [(None, Read(0, 0, 0, nbytes, 0)) for nbytes in (8, 8, 8, 8, 1)]
    shares = list(share_out(reads, 2))
    assert sum(shares, []) == reads and [sum(r.nbytes for _, r in share) for share in shares] == [24, 9]
    assert list(share_out([], 2)) == []


def test_transport_follows_the_places_unless_it_is_set():
    cpu, gpu, far = Place("a", "cpu"), Place("a", "cuda", True), Place("b", "cuda", True)
    assert choose_transport("auto", cpu, cpu) == choose_transport("auto", gpu, cpu) == "shared_memory"
    assert choose_transport("auto", gpu, gpu) == "cuda_ipc"
    assert choose_transport("auto", gpu, far) == "rdma_ibverbs"
    assert choose_transport("auto", cpu, far) == "tcp"
    assert choose_transport("rdma_tcp", cpu, cpu) == "rdma_tcp"
    assert describe(["rdma_tcp", "shared_memory", "rdma_tcp"]) == "shared_memory (1 pair), rdma_tcp (2 pairs)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU")
def test_cuda_ipc_between_two_processes():
    """A child maps the parent's GPU memory and fetches a version from it."""
    channel = Channel.__new__(Channel)
    channel.parameters = {name: tensor.cuda() for name, tensor in values_of(0).items()}
    interner = Interner()
    shards = channel.rows(0, 1)
    needs = interner.units(("", Need(name, whole(shape), "float32")) for name, shape in SHAPES.items())
    plan = Plan([holdings(shards, interner)], [needs])
    writer = WeightWriter(0, shards, plan.slot(0), torch.device("cuda"))
    writer.stage(1)
    setup = ReaderSetup(plan.reads(0, 0), [writer.region.handle(over_rdma=False)], ["cuda_ipc"])
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=_fetch_on_gpu, args=(setup,))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def _fetch_on_gpu(setup: ReaderSetup) -> None:
    reader = WeightReader(setup, torch.device("cuda"))
    asyncio.run(reader.fetch(1, 60))
    got = {name: values for name, _, _, values in reader.pieces()}
    assert all(torch.equal(got[name].cpu(), tensor) for name, tensor in values_of(0).items())


def test_a_thread_that_gives_way_never_becomes_less_nice():
    def niceness(before: int) -> int:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, before)
        lower_priority(5)
        return os.getpriority(os.PRIO_PROCESS, thread)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as nicer, ThreadPoolExecutor(1) as other:
        assert nicer.submit(niceness, 19).result() == 19
        assert other.submit(niceness, own).result() == max(5, own)
