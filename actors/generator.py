"""The generator actor: a vLLM engine that many episodes ask at once, and that takes new weights between its steps."""

import asyncio
import os
import socket
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.config import GeneratorConfig
from titan_rl.episode import Request
from titan_rl.mesh.channel import RegionHandle, Transport, WeightReader, WeightVersion
from titan_rl.mesh.logs import send_output_to
from titan_rl.model.tokenizer import stop_token_ids
from titan_rl.types import Completion, EngineStatistics


class Generator(Actor):
    """One replica. Its engine runs in a thread of its own, so no endpoint ever blocks the actor."""

    def __init__(self, logs: str | None, replica: int, config: GeneratorConfig, model_path: str, max_model_len: int):
        send_output_to(logs, f"generator{replica}")
        self.config, self.model_path, self.max_model_len = config, model_path, max_model_len

    @concurrent_endpoint
    async def start(self) -> int:
        """Load vLLM and the model; this process's id."""

        def load():
            from titan_rl.generation import GenerationEngine, engine_arguments

            arguments = engine_arguments(self.config, self.model_path, self.max_model_len)
            return GenerationEngine(arguments, stop_token_ids(Path(self.model_path)))

        self.engine = await asyncio.to_thread(load)
        return os.getpid()

    @concurrent_endpoint
    async def host(self) -> str:
        return socket.gethostname()

    @concurrent_endpoint
    async def connect(self, regions: list[RegionHandle], transport: Transport) -> None:
        """Open the trainer's regions; once, before the first update."""
        self.reader = WeightReader(regions, transport)
        await asyncio.wrap_future(self.engine.connect(self.reader))

    @concurrent_endpoint
    async def update(self, version: WeightVersion, timeout: float) -> EngineStatistics:
        """Fetch a version and apply it between two engine steps; what the engine did under the one before."""
        await self.reader.fetch(version, timeout)
        return await asyncio.wrap_future(self.engine.update(self.reader, version))

    @concurrent_endpoint
    async def generate(self, request: Request) -> list[Completion]:
        return await asyncio.wrap_future(self.engine.generate(request))

    @concurrent_endpoint
    async def take_statistics(self) -> EngineStatistics:
        return await asyncio.wrap_future(self.engine.take_statistics())
