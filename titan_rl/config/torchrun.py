"""Environment of torchrun: number of trainer ranks, this process's rank, and where to report failures.

Its processes number as many as the trainer's ranks, as in TorchTitan. Rank 0 becomes the controller, the others its
hosts (mesh/launch/torchrun.py); actors, not these processes, hold the model.
"""

import json
import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import Config

_DEGREES = (
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
)
_SHARDS, _FILL_UP = "data_parallel_shard_degree", -1
"""TorchTitan's degree that becomes whatever the world size leaves, and the value that asks for it."""
_NUMBERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_ITS_OWN = (*_NUMBERS, *_SIZES, "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")
_ITS_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""It sets these where nobody did. Each actor gets threads of its own (mesh/resources/cores.py)."""
_RUN = "titan_rl_run.json"
_MOST_DIGITS = 9


@dataclass(frozen=True)
class World:
    """One of torchrun's processes, and its place among them."""

    rank: int
    size: int
    restarts: int
    """How often torchrun has started all of them again."""
    error_file: Path | None
    """Where torchrun reads why this process failed: ``JOB/attempt_N/RANK/error.json``. None: it keeps none."""

    @property
    def attempt(self) -> Path:
        """A folder of this start's processes, on their host."""
        assert self.error_file is not None, "asked for only where torchrun keeps error files"
        return self.error_file.parent.parent

    @property
    def job(self) -> Path:
        """A folder of all starts of these processes."""
        return self.attempt.parent


def number_of(environment: Mapping[str, str], name: str) -> int:
    """Number in an environment variable; 0 if unset. Errors: ConfigError."""
    text = environment.get(name) or "0"
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{name} = {text!r:.60} in the environment is not a process count: unset {name}")
    return int(text)


def world_of(environment: Mapping[str, str]) -> World | None:
    """Rank and size from torchrun's environment; None without torchrun. Errors: ConfigError."""
    if "TORCHELASTIC_RUN_ID" not in environment or not environment.get("WORLD_SIZE", "").isdecimal():
        return None
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return World(
        rank=number_of(environment, "RANK"),
        size=number_of(environment, "WORLD_SIZE"),
        restarts=number_of(environment, "TORCHELASTIC_RESTART_COUNT"),
        error_file=Path(error_file) if error_file else None,
    )


def refusal(environment: Mapping[str, str]) -> str:
    """Why torchrun's processes cannot become a run, and what to do; empty if they can."""
    world, local = world_of(environment), environment.get("LOCAL_WORLD_SIZE", "")
    if world is None:
        return "WORLD_SIZE is set, but not by torchrun: unset it, or start the run by torchrun"
    if local != str(world.size):
        return (
            f"torchrun runs {world.size} processes, {local or 'none'} of them on this node, and a run is on one node "
            f"so far: give --nnodes=1 and --nproc_per_node, or start `titan-rl train` once"
        )
    if world.error_file is None:
        return "torchrun was given --log-dir /dev/null, and its processes meet in that folder: leave it out"
    return _openness(world.job)


def _openness(folder: Path) -> str:
    """Who can write there could have a rank run code."""
    try:
        status = folder.stat()
    except OSError as error:
        return f"torchrun's folder {folder} cannot be read: {error.strerror}; give torchrun another --log-dir"
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return f"torchrun's folder {folder} is open to other users: chmod 700 it, or give torchrun another --log-dir"


def forget(environment: MutableMapping[str, str]) -> None:
    """Take torchrun's variables away: actors, and what they start, are no ranks of it."""
    for name in list(environment):
        is_default = environment[name] == _ITS_DEFAULTS.get(name)
        if name in _ITS_OWN or name.startswith("TORCHELASTIC_") or is_default:
            del environment[name]


def adopt(config: Config, world: World) -> None:
    """Give the trainer as many ranks as torchrun has processes. Errors: ConfigError if the TOML says otherwise."""
    if config.hosts.is_on:
        raise ConfigError(
            f"hosts.launcher = {config.hosts.launcher!r}: under torchrun its processes are the hosts; leave it out"
        )
    if config.mesh.worker_loops or config.mesh.launcher != "local":
        key = "worker_loops" if config.mesh.worker_loops else "launcher"
        raise ConfigError(
            f"mesh.{key} = {getattr(config.mesh, key)!r}: under torchrun its processes are the hosts; leave it out"
        )
    table = config.titan.setdefault("parallelism", {})
    others = _product(table)
    if others is not None:  # else it is no number, which is told where the section is built
        table[_SHARDS] = _shards(table, others, world.size)


def _product(table: dict[str, Any]) -> int | None:
    product = 1
    for degree in (table.get(name, 1) for name in _DEGREES):
        if type(degree) is not int or degree < 1:
            return None
        product *= degree
    return product


def _shards(table: dict[str, Any], others: int, size: int) -> Any:
    shards = table.get(_SHARDS, _FILL_UP)
    if type(shards) is not int or shards < _FILL_UP:
        return shards
    if shards == _FILL_UP and size % others == 0:
        return size // others
    degrees = [f"{name} = {table[name]}" for name in (_SHARDS, *_DEGREES) if table.get(name, 1) not in (1, _FILL_UP)]
    if shards * others != size:
        raise ConfigError(
            f"torchrun starts {size} processes, and [parallelism] ({', '.join(degrees) or f'{_SHARDS} = {shards}'}) "
            f"needs {f'a multiple of {others}' if shards == _FILL_UP else shards * others}: give that as "
            f"--nproc_per_node, or leave parallelism.{_SHARDS} out"
        )
    return shards


# a job that torchrun starts again goes on with the run that it had begun


def record_run(world: World, run: Path) -> None:
    """Record the run directory for the job's next start."""
    if world.error_file is not None:
        (world.job / _RUN).write_text(json.dumps(str(run.absolute())))


def earlier_run(world: World) -> str | None:
    """The run directory that an earlier start of this job has begun."""
    if not world.restarts or world.error_file is None or _openness(world.job):
        return None
    with suppress(OSError, ValueError, RecursionError):
        run = json.loads((world.job / _RUN).read_text())
        return run if isinstance(run, str) else None
    return None


def report_to_torchrun(world: World, why: str) -> None:
    """Write the reason of a failure for torchrun to print."""
    if world.error_file is None:
        return
    details = {"py_callstack": why, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        world.error_file.write_text(json.dumps({"message": {"message": why, "extraInfo": details}}))
