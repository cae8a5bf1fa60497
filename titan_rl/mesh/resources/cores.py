"""How many cores each process gets (pure arithmetic), and the environment of each kind of process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Threads:
    """Threads for each process of a kind."""

    trainer: int
    generator: int


def share_cores(num_cores: int, trainer_ranks: int, replicas: int, alternating: bool) -> Threads:
    """Synchronous runs train and generate in turn, so each phase gets all cores; asynchronous ones split them.

    Episodes and scoring are light, and use what is left of the generators' share.
    """
    if alternating:
        return Threads(max(1, num_cores // trainer_ranks), max(1, num_cores // replicas))
    for_training = max(1, num_cores // 2)
    return Threads(max(1, for_training // trainer_ranks), max(1, (num_cores - for_training) // replicas))


@dataclass(frozen=True)
class Crew:
    """How many processes of each kind compute in a run, for hosts that have cores of their own."""

    counts: Mapping[str, int]
    """Of trainer ranks and of ranks of engines."""
    alternating: bool

    def threads(self, kind: str, num_cores: int, here: Mapping[str, int]) -> int | None:
        """Of a process on a host of so many cores, with so many of each kind on it; None for one that does not compute.

        One of a kind that is not meant to be there, but is since others are lost, counts as one more.
        """
        role = kind if kind in ("generator", "verifier") else "trainer"
        if role not in self.counts:
            return None
        ours = max(here.get(role, 0), 1)
        is_shared = not self.alternating and any(count for other, count in here.items() if other != role)
        return max(1, (num_cores // 2 if is_shared else num_cores) // ours)


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


_COMMON = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # a thread that waits must not burn the core that the next phase needs; but one that sleeps at once, between two
    # operators of one step, costs a tenth of SmolLM2's training and half of the tiny model's: it spins some 0.3 ms
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    # torch keeps what it compiled in the temporary folder, which here is the run's own and goes with it
    "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    or os.path.expanduser("~/.cache/titan_rl/torchinductor"),
}
# freed memory is kept: giving it back and faulting it in again cost a quarter of a CPU training step
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


# actors and engines compute off the main thread, whose arena alone can keep blocks of more than 64 MiB: where those go
# and come in each step, a tenth of SmolLM2's training was spent on their pages
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}


# rows of ever new lengths make oneDNN compile anew for each, and 1,024 compiled products would hold up to 2 GiB; a row
# has some 100 of them, in all of its layers
_FEW_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


# a peer's death ends NCCL's collectives from outside (mesh/supervision/peers.py): torch's watchdog must not end the
# process for that; that a collective takes too long is a deadline's business
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def trainer_environment(threads: Threads) -> dict[str, str]:
    return (
        _COMMON | _KEEP_MEMORY | _ONE_ARENA | _FEW_PRODUCTS | _NO_WATCHDOG | {"OMP_NUM_THREADS": str(threads.trainer)}
    )


_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# on a CPU vLLM compiles a few sampler functions at the first step: 15 s the first time, and slower than eager
_VLLM_ON_CPU = _VLLM | {"TORCHDYNAMO_DISABLE": "1"}


def generator_environment(threads: Threads, on_cpu: bool) -> dict[str, str]:
    threads_of_it = {"OMP_NUM_THREADS": str(threads.generator)}
    return _COMMON | _KEEP_MEMORY | _ONE_ARENA | (_VLLM_ON_CPU if on_cpu else _VLLM) | threads_of_it


def verifier_environment() -> dict[str, str]:
    return _COMMON | {"OMP_NUM_THREADS": "1"}


def fork_environment() -> dict[str, str]:
    """Of the servers that fork these. Threads are set after the fork."""
    return _COMMON | _KEEP_MEMORY


def import_environment(kind: str, on_cpu: bool) -> dict[str, str]:
    """More, for the server of one kind: what libraries that only it imports read then."""
    vllm = _VLLM_ON_CPU if on_cpu else _VLLM
    return {"trainer": _ONE_ARENA | _FEW_PRODUCTS | _NO_WATCHDOG, "generator": _ONE_ARENA | vllm}.get(kind, {})
