"""The actors of a run, with what it takes to look at the channel from inside their processes.

Their processes import this file, and it must not import the controller's side of the mesh: that brings Flask along
(by ``monarch.job``), in whose presence vLLM does not start on a CPU.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from monarch.rdma import RDMABuffer

from titan_rl.actors.generator import Generator
from titan_rl.actors.trainer import Trainer
from titan_rl.compat.torch.tensors import copy_each
from titan_rl.config.device_defaults import generator_on


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


class BenchTrainer(Trainer):
    @endpoint
    def wait_for_stamp(self) -> None:
        assert self.writer is not None
        self.writer.wait()

    @endpoint
    def cast_and_copy(self, rounds: int) -> float:
        """Seconds of the cast and copy of this rank's shards, into the slot that the next version takes, alone."""
        assert self.writer is not None
        into, values = map(list, zip(*self.writer.copies[0], strict=True))
        with torch.no_grad():
            return median_seconds(lambda: copy_each(into, values), rounds)

    @endpoint
    def tensor_buffers(self) -> dict[str, tuple[RDMABuffer, int]]:
        """One RDMABuffer for each tensor, as generators store it."""
        self._tensors = self._cast()
        return {
            name: (RDMABuffer(tensor.view(torch.uint8).flatten()), tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    @endpoint
    def send_tensors(self, generator: Any) -> float:
        """Seconds until the generator has all tensors, as arguments of its endpoint."""
        tensors = self._cast()
        start = time.perf_counter()
        generator.take_tensors.call_one(tensors).get()
        return time.perf_counter() - start

    @endpoint
    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor, of a trainer that holds them whole."""
        return {shard.name: _digest(shard.tensor) for shard in self.policy_side.shards()}

    def _cast(self) -> dict[str, torch.Tensor]:
        generator = generator_on(self.config.generator, on_cpu=self.learner.device.type == "cpu")
        dtype = getattr(torch, generator.dtype)
        return {shard.name: shard.tensor.to(dtype).contiguous() for shard in self.policy_side.shards()}


class BenchGenerator(Generator):
    @concurrent_endpoint
    async def fetch_seconds(self, version: int, rounds: int) -> float:
        """Seconds of fetching a stamped version into this process's memory, checksums included."""
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            await self.reader.fetch(version, 60.0)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    @concurrent_endpoint
    async def memcpy_seconds(self, rounds: int) -> float:
        """Seconds of one memcpy of as many bytes, between two resident places."""
        source, into = (np.ones(self.reader.plan.nbytes, np.uint8) for _ in range(2))
        return await asyncio.to_thread(median_seconds, lambda: np.copyto(into, source), rounds)

    @concurrent_endpoint
    async def load_weights_seconds(self) -> float:
        """Seconds of vLLM's own reload from whole tensors in memory. One tensor-parallel rank only."""
        tensors = self._fetched()

        def load(worker: Any) -> None:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            model = worker.model_runner.get_model()
            with set_current_vllm_config(worker.vllm_config):
                initialize_layerwise_reload(model)
                model.load_weights(iter(tensors.items()))
                finalize_layerwise_reload(model, worker.vllm_config.model_config)

        def measure() -> float:
            start = time.perf_counter()
            self.engine.on_worker(load)
            return time.perf_counter() - start

        return await asyncio.to_thread(measure)

    def _fetched(self) -> dict[str, torch.Tensor]:
        """The tensors of the version at hand, put together. One tensor-parallel rank only."""
        parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
        for name, _, box, values in self.reader.pieces():
            parts.setdefault(name, []).append((box.start, values))
        return {
            name: torch.cat([values for _, values in sorted(boxes, key=lambda part: part[0])])
            for name, boxes in parts.items()
        }

    @concurrent_endpoint
    async def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor of the version at hand."""
        return {name: _digest(tensor) for name, tensor in self._fetched().items()}

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
    """Baseline actor without a channel."""

    @endpoint
    def take_tensors(self, tensors: dict[str, torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())
