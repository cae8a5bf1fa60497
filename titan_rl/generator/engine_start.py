"""Start of a vLLM engine in this process, alone or as one rank of several."""

import multiprocessing
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import titan_rl.compat.vllm.lean_import  # noqa: F401  # isort: skip  (before the rest of vLLM)
import torch.distributed as dist
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from titan_rl.compat.vllm.loading import inspect_models_here, rebind_kernels_of_vllm
from titan_rl.compat.vllm.sampling import sample_by_inversion
from titan_rl.compat.vllm.speculation import replace_functions
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.generator.ranks import RankExecutor, forget_shared_memory, join_ranks, reserve_shared_memory
from titan_rl.mesh.resources.listeners.gloo import guard_gloo
from titan_rl.mesh.resources.released_memory import ZerosOnDemand


def start_engine(
    config: GeneratorConfig,
    arguments: EngineArgs,
    rank: int,
    rendezvous_file: Path | None,
    devices: Sequence[int],
) -> LLMEngine:
    """``rendezvous_file``, ``devices``: as ``GenerationEngine`` has them."""
    guard_gloo()
    inspect_models_here()
    rebind_kernels_of_vllm()
    if current_platform.is_cpu():
        sample_by_inversion()
    if config.speculative.method != "none":
        # numba, which looks for drafts, else takes a semaphore in /dev/shm, which a killed process leaves there
        multiprocessing.set_start_method("spawn", force=True)
        replace_functions(on_cpu=current_platform.is_cpu())
    if config.tensor_parallel == 1:
        with _cache_on_demand():
            return LLMEngine.from_engine_args(arguments)
    assert rendezvous_file is not None, "an engine of several ranks is given one"
    join_ranks(rank, config.tensor_parallel, rendezvous_file, devices)
    with _cache_on_demand():
        engine = LLMEngine(arguments.create_engine_config(), RankExecutor, log_stats=False)
    reserve_shared_memory()
    dist.barrier()
    forget_shared_memory()
    return engine


def _cache_on_demand() -> AbstractContextManager[object]:
    """A context in which a CPU's KV cache takes memory as it is written to. A GPU's engine may compile its model here,
    which no compiler can do under a mode of torch's functions."""
    return ZerosOnDemand() if current_platform.is_cpu() else nullcontext()
