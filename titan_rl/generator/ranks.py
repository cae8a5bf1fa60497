"""The ranks of a tensor-parallel vLLM engine, each in a process that we started."""

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_IDENTITY = "TITAN_RL_ENGINE"


def join_ranks(rank: int, size: int, rendezvous_file: Path) -> None:
    """vLLM takes the process group that it finds. The rendezvous file opens no port; it must not exist yet."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ[_IDENTITY] = f"{rendezvous_file.parent.name}-{rendezvous_file.name}"
    store = dist.FileStore(str(rendezvous_file), size)
    dist.init_process_group(current_platform.dist_backend, store=store, rank=rank, world_size=size)


class RankExecutor(ExecutorWithExternalLauncher):
    """One rank's worker. vLLM names its shared memory after what follows the last colon, so each engine has its own."""

    def _distributed_args(self) -> tuple[str, int, int]:
        rank = int(os.environ["RANK"])
        return f"titan_rl:{os.environ[_IDENTITY]}", rank, rank


def forget_shared_memory() -> None:
    """All ranks have mapped vLLM's segments: without a name they go when the last rank does, however it ends."""
    for file in Path("/dev/shm").glob(f"{os.environ[_IDENTITY]}-*"):
        with suppress(FileNotFoundError):
            file.unlink()
