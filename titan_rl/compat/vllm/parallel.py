"""vLLM's process groups, set without processes: what a rank of a large model would load is recorded so."""

from typing import Any

import vllm.distributed.parallel_state as parallel

from titan_rl.compat.reach import VLLM, Reach

_OTHERS = ("_WORLD", "_PP", "_DP", "_EP", "_PCP", "_DCP")
REACHES = tuple(
    Reach(f"vllm.distributed.parallel_state:{name}", "record what a rank of many would load")
    for name in (*_OTHERS, "_TP")
)
VLLM.require(REACHES)


def set_parallel_groups(tensor_parallel: Any, alone: Any) -> None:
    """Have this process take ``tensor_parallel`` for its group of that name, and ``alone`` for each other one."""
    for name in _OTHERS:
        setattr(parallel, name, alone)
    parallel._TP = tensor_parallel
