"""The ranks of a tensor-parallel vLLM engine, each in a process that we started."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.platforms import current_platform

from titan_rl.compat.vllm.engine import OwnRankExecutor

_IDENTITY = "TITAN_RL_ENGINE"


def join_ranks(rank: int, size: int, rendezvous_file: Path, devices: Sequence[int] = ()) -> None:
    """Initialize the process group that vLLM then uses. ``rendezvous_file`` must not exist yet; it opens no port.
    ``devices``: of the ranks, if they are on GPUs."""
    if devices:
        torch.accelerator.set_device_index(devices[rank])  # vLLM's own comes after the group's first collective
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ[_IDENTITY] = f"{rendezvous_file.parent.name}-{rendezvous_file.name}"
    store = dist.FileStore(str(rendezvous_file), size)  # pyright: ignore[reportPrivateImportUsage]  # it is documented
    dist.init_process_group(current_platform.dist_backend, store=store, rank=rank, world_size=size)


class RankExecutor(OwnRankExecutor):
    """Executor of one rank's worker.

    vLLM names its shared memory by the text after the last colon, here unique to each engine.
    """

    def rank_arguments(self) -> tuple[str, int, int]:
        rank = int(os.environ["RANK"])
        return f"titan_rl:{os.environ[_IDENTITY]}", rank, rank


def reserve_shared_memory() -> None:
    """Allocate all pages of this process's segments in /dev/shm. vLLM leaves them to the first write,
    which would be the end of the process if others had filled that by then. Errors: OSError if there is no room."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith("/dev/shm/")}:
        with suppress(FileNotFoundError), open(path, "r+b") as segment:  # it may have no name any more
            os.posix_fallocate(segment.fileno(), 0, os.fstat(segment.fileno()).st_size)


def forget_shared_memory() -> None:
    """Remove the names of vLLM's segments, which all ranks have mapped: the memory is freed when the last rank ends."""
    for file in Path("/dev/shm").glob(f"{os.environ[_IDENTITY]}-*"):
        with suppress(FileNotFoundError):
            file.unlink()
