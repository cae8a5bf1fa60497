"""The generator actor: a rank of a vLLM engine that many episodes ask, and that takes weights between its steps."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor

from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.types import Completion, EngineStatistics, Request
from titan_rl.mesh.channel.plan import DRAFTER, AdapterForm, Interner, Units
from titan_rl.mesh.channel.reader import ReaderSetup
from titan_rl.mesh.channel.relay.gathering import Fetched, Route
from titan_rl.mesh.channel.relay.memory import RelayHandle
from titan_rl.mesh.channel.transports import Place, here
from titan_rl.mesh.processes.concurrent import concurrent_endpoint
from titan_rl.mesh.processes.remote_eval import run_examination
from titan_rl.mesh.resources.background_thread import in_side_thread
from titan_rl.mesh.resources.imports import import_all

if TYPE_CHECKING:  # it needs vLLM
    from titan_rl.generator.engine import GenerationEngine


class Generator(Actor):
    """A tensor-parallel rank of one replica; rank 0 answers for all.

    The engine runs in a thread of its own, so no endpoint blocks the actor.
    """

    IMPORTS = "generator"

    def __init__(
        self,
        config: GeneratorConfig,
        model_path: str,
        max_model_len: int,
        sleeps: bool = False,
        records_routing: bool = False,
        invariant_parts: int = 0,
        images: ImagesConfig | None = None,
    ):
        """``sleeps``: whether it gives up its memory at times; ``records_routing``: whether it may be asked which
        experts tokens went through; ``invariant_parts``: not 0 if it computes as the trainer does, bit for bit;
        ``images``: limits of images, None: the model's own."""
        self.config, self.model_path, self.max_model_len = config, model_path, max_model_len
        self.modes = sleeps, records_routing, invariant_parts, images or ImagesConfig()

    @concurrent_endpoint
    async def prepare(self) -> None:
        """Import everything in advance, in a standby."""
        await asyncio.to_thread(import_all, self.IMPORTS)

    @concurrent_endpoint
    async def start(self, rank: int, rendezvous_file: str, devices: tuple[int, ...] = ()) -> None:
        """Load vLLM and the model, together with the replica's other ranks, which meet at ``rendezvous_file``.
        ``devices``: the GPUs of all of them, on this host."""

        def load() -> "GenerationEngine":
            from titan_rl.generator.engine import GenerationEngine

            model = self.config, self.model_path, self.max_model_len
            return GenerationEngine(*model, rank, Path(rendezvous_file), devices, *self.modes)

        self.engine = await in_side_thread(load)

    @concurrent_endpoint
    async def place(self) -> Place:
        return here()

    @concurrent_endpoint
    async def needs(self, adapters: dict[str, AdapterForm] | None = None, *, drafter: bool = False) -> Units:
        """Checkpoint boxes that this rank stores, recorded from vLLM's own loader. ``adapters``: those that
        are to come in place of weights, by the weights' names. ``drafter``: with the draft model's, which learns."""
        from titan_rl.generator.weights.adapter_reader import adapter_needs
        from titan_rl.generator.weights.vllm_recording import needs

        recorded = [copy for copy in self.engine.recorded if drafter or not copy.name.startswith(DRAFTER)]
        interner = Interner()
        return needs(recorded, interner) if adapters is None else adapter_needs(recorded, adapters, interner)

    @concurrent_endpoint
    async def connect(self, setup: ReaderSetup) -> RelayHandle | None:
        """Open the trainer's regions: before the first update, and again after a repair of the trainer. Where other
        ranks can take versions that come here, if they are to."""
        self.reader = await in_side_thread(self.engine.connect, setup)
        return self.reader.relay

    @concurrent_endpoint
    async def fetch(self, version: int, timeout: float, route: Route | None = None) -> Fetched:
        """Copy this rank's bytes of a version here, while the engine goes on. ``route``: from whom."""
        return await self.reader.fetch(version, timeout, route)

    @concurrent_endpoint
    async def apply(self, version: int) -> EngineStatistics:
        """Rank 0, when all ranks have fetched: use the version from the next step on. Statistics of the one before."""
        return await asyncio.wrap_future(self.engine.apply(version))

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Release weights and KV of all ranks until the next ``apply``. Rank 0 only."""
        await asyncio.wrap_future(self.engine.sleep())

    @concurrent_endpoint
    async def seconds_awake(self) -> float:
        """Since it last slept; 0 while it sleeps. Any rank."""
        return self.engine.seconds_awake

    @concurrent_endpoint
    async def account(self) -> tuple[int, int, int]:
        """Version in use, bytes to fetch of one, and bytes that this rank stores."""
        return self.engine.version, sum(read.nbytes for read in self.reader.plan.reads), self.engine.bytes_stored

    @concurrent_endpoint
    async def generate(self, request: Request) -> list[Completion]:
        """Completions of a request, one a seed. Rank 0 only."""
        return await asyncio.wrap_future(self.engine.generate(request))

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """Sample a request no further, whose caller has left. Rank 0 only."""
        await asyncio.wrap_future(self.engine.abort(request_id))

    @concurrent_endpoint
    async def take_statistics(self) -> EngineStatistics:
        """Engine statistics since the last update or the last call. Rank 0 only."""
        return await asyncio.wrap_future(self.engine.take_statistics())

    @concurrent_endpoint
    async def examine(self, code: bytes) -> tuple[bytes, str]:
        """Result of a pickled function of this rank's engine; as ``Trainer.examine``."""
        return await in_side_thread(run_examination, code, self.engine)
