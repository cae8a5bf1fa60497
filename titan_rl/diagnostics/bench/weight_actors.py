"""The actors of a run, with what it takes to measure the channel from inside their processes."""

import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from monarch.rdma import RDMABuffer

from titan_rl.actors.generator import Generator
from titan_rl.actors.trainer import Trainer
from titan_rl.actors.verifier import Verifier
from titan_rl.mesh.meshes import ActorClasses


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class BenchTrainer(Trainer):
    @endpoint
    def wait_for_stamp(self) -> None:
        self.writer.wait()

    @endpoint
    def cast_and_copy(self, rounds: int) -> float:
        """Seconds of the cast and copy of this rank's shards, into the slot that the next version takes, alone."""
        into, values = zip(*self.writer.copies[0], strict=True)
        with torch.no_grad():
            return median_seconds(lambda: torch._foreach_copy_(into, values), rounds)

    @endpoint
    def tensor_buffers(self) -> dict[str, tuple[RDMABuffer, int]]:
        """One RDMABuffer for each tensor, as generators store it."""
        self._tensors = self._cast()
        return {
            name: (RDMABuffer(tensor.view(torch.uint8).flatten()), tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    @endpoint
    def send_tensors(self, generator) -> float:
        """Seconds until the generator has all tensors, as arguments of its endpoint."""
        tensors = self._cast()
        start = time.perf_counter()
        generator.take_tensors.call_one(tensors).get()
        return time.perf_counter() - start

    def _cast(self) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, self.config.generator.dtype)
        return {shard.name: shard.tensor.to(dtype).contiguous() for shard in self.learner.shards()}


class BenchGenerator(Generator):
    @concurrent_endpoint
    async def fetch_seconds(self, version: int, rounds: int) -> float:
        """Of bringing a stamped version's bytes into this process's own memory, checksums included."""
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            await self.reader.fetch(version, 60.0)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    @concurrent_endpoint
    async def memcpy_seconds(self, rounds: int) -> float:
        """Of one memcpy of as many bytes, between two places that are in memory."""
        source, into = (np.ones(self.reader.plan.nbytes, np.uint8) for _ in range(2))
        return await asyncio.to_thread(median_seconds, lambda: np.copyto(into, source), rounds)

    @concurrent_endpoint
    async def load_weights_seconds(self) -> float:
        """Of vLLM's own reload from whole tensors that are in memory already. One tensor-parallel rank only."""
        tensors = {name: torch.empty(0) for name, *_ in self.reader.pieces()}
        parts = {name: [] for name in tensors}
        for name, _, box, values in self.reader.pieces():
            parts[name].append((box.start, values))
        tensors = {
            name: torch.cat([values for _, values in sorted(found, key=lambda part: part[0])])
            for name, found in parts.items()
        }

        def load(worker) -> None:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            model = worker.model_runner.get_model()
            with set_current_vllm_config(worker.vllm_config):
                initialize_layerwise_reload(model)
                model.load_weights(iter(tensors.items()))
                finalize_layerwise_reload(model, worker.vllm_config.model_config)

        def measure() -> float:
            start = time.perf_counter()
            self.engine._on_worker(load)
            return time.perf_counter() - start

        return await asyncio.to_thread(measure)

    @concurrent_endpoint
    async def read_tensors(self, buffers: dict[str, tuple[RDMABuffer, int]]) -> float:
        """Seconds to read each tensor through its own RDMABuffer, one after the other."""
        into = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, (_, nbytes) in buffers.items()}
        start = time.perf_counter()
        for name, (buffer, _) in buffers.items():
            await buffer.read_into(into[name], timeout=120)
        return time.perf_counter() - start

    @concurrent_endpoint
    async def take_tensors(self, tensors: dict[str, torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())


class PlainActor(Actor):
    """What a user has without a channel."""

    @endpoint
    def take_tensors(self, tensors: dict[str, torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())


BENCH_ACTORS = ActorClasses(BenchTrainer, BenchGenerator, Verifier)
