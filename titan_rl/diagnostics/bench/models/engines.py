"""Generator actors for a bench, without a run around them."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from titan_rl.config.sections.schema import Config, GeneratorConfig
from titan_rl.mesh.resources.cores import available_cores, generator_environment, share_cores


@contextmanager
def model_directory(config: Config) -> Iterator[str]:
    """The model's directory; one of the tiny model is made."""
    with tempfile.TemporaryDirectory() as folder:
        path = config.model.path
        if path == "tiny":
            from titan_rl.models.builtin.tiny import make_tiny

            path = str(Path(folder) / "tiny")
            make_tiny(path, seed=config.run.seed)
        yield path


def engine_environment() -> dict[str, str]:
    """Environment of an engine that has all cores."""
    from titan_rl.models.device import DEVICE_TYPE

    return generator_environment(share_cores(available_cores(), 1, 1, alternating=True), DEVICE_TYPE == "cpu")


@asynccontextmanager
async def started_engines(
    settings: Mapping[str, GeneratorConfig], path: str, max_len: int
) -> AsyncIterator[dict[str, Any]]:
    """Engines by name, each in a process of its own until the end, with the weights of a model's directory."""
    from monarch.actor import default_bootstrap_cmd, this_host

    from titan_rl.actors.generator import Generator

    command = default_bootstrap_cmd().with_env(engine_environment())
    processes, engines = [], {}
    try:
        for number, (name, config) in enumerate(settings.items()):
            procs = this_host().spawn_procs(per_host={"ranks": 1}, name=f"engine{number}", bootstrap_command=command)
            processes.append(procs)
            engines[name] = procs.spawn("generator", Generator, config, path, max_len)
            await engines[name].start.call_one(0, "")
        yield engines
    finally:
        for procs in processes:
            await procs.stop()
