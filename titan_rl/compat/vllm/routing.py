"""vLLM's mixtures of experts: the experts that each token of a request went through.

On a GPU vLLM returns them itself (``enable_return_routed_experts``), by Model Runner V2. On a CPU its own capturer
records a step's choices, and here they are put together by requests. Where a prompt's keys and values are in the prefix
cache, nobody computes it again: so the choices lie by blocks of that cache, too.

Dimensions: N tokens of a step, T of a request so far, L layers of the decoder, K experts of a token in a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from titan_rl.compat.reach import VLLM, Reach

_CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
REACHES = (
    Reach(f"{_CAPTURER}:RoutedExpertsCapturer.snapshot_routing_data", "read the experts that a CPU's step chose"),
    Reach(f"{_CAPTURER}:RoutedExpertsCapturer.shape_per_token", "know how many layers and experts there are"),
    Reach(f"{_CAPTURER}:bind_routed_experts_capturer", "have a CPU's routers say what they choose"),
    Reach(f"{_RUNNER}.execute_model", "see each step of a CPU"),
    Reach(f"{_RUNNER}.requests", "know where a request's keys and values are"),
    Reach("vllm.v1.worker.gpu_input_batch:CachedRequestState.block_ids", "know where a request's keys and values are"),
    Reach("vllm.v1.worker.gpu_input_batch:CachedRequestState.num_computed_tokens", "know which tokens a step computes"),
    Reach("vllm.outputs:CompletionOutput.routed_experts", "take the experts that a GPU's engine returns"),
)
VLLM.require(REACHES)


@dataclass
class _Known:
    """Experts of a request's tokens so far."""

    parts: list[np.ndarray] = field(default_factory=list)
    count: int = 0

    def add(self, chosen_NLK: np.ndarray) -> None:
        self.parts.append(chosen_NLK)
        self.count += len(chosen_NLK)


class RouteRecorder:
    """Recorder of the experts that each token of an engine's requests went through, on a CPU.

    A token keeps the ones of the first pass over it: those that the next token was sampled by.
    """

    def __init__(self, scheduler: Scheduler, runner: GPUModelRunner):
        self._runner, config = runner, scheduler.vllm_config
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.get_model(), self._capturer)
        self._of_requests: dict[str, _Known] = {}
        """Of each running request, by vLLM's own id."""
        groups = scheduler.kv_cache_config.kv_cache_groups
        whole = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        self._group: int | None = whole[0] if whole else None
        """Of the cache's groups, one that keeps all tokens of a request."""
        if self._group is not None:
            sizes = scheduler.kv_cache_config.num_blocks, groups[self._group].kv_cache_spec.block_size
            self._cached = np.zeros((*sizes, *self._capturer.shape_per_token), self._capturer.output_dtype_name)
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model  # pyright: ignore[reportAttributeAccessIssue]  # it is called by name

    def take(self, request_id: str, count: int) -> np.ndarray:
        """Experts of the first ``count`` tokens of a request that has ended: [count, L, K]."""
        return np.concatenate(self._of_requests.pop(request_id).parts)[:count]

    def _execute_model(self, step: SchedulerOutput, *arguments: Any) -> Any:
        output = self._execute(step, *arguments)
        for request_id in step.finished_req_ids:  # those that were aborted: nobody takes them
            self._of_requests.pop(request_id, None)
        if step.total_num_scheduled_tokens:
            self._record(step)
        return output

    def _record(self, step: SchedulerOutput) -> None:
        chosen_NLK = self._capturer.snapshot_routing_data(step.total_num_scheduled_tokens).numpy()
        begin = 0
        for request_id in self._runner.input_batch.req_ids:
            count = step.num_scheduled_tokens[request_id]
            self._add(request_id, chosen_NLK[begin : begin + count])
            begin += count
        assert begin == len(chosen_NLK), "a step's requests are those of its batch"

    def _add(self, request_id: str, chosen_NLK: np.ndarray) -> None:
        """Choices of a request's tokens that a step computed."""
        begin = self._runner.requests[request_id].num_computed_tokens
        places = np.arange(begin, begin + len(chosen_NLK))
        if self._group is not None:
            self._cached[self._blocks(request_id, places)] = chosen_NLK
        if (known := self._of_requests.get(request_id)) is None:
            known = self._of_requests[request_id] = _Known()
            if begin:  # what the prefix cache has of it
                known.add(self._cached[self._blocks(request_id, np.arange(begin))])
        assert begin <= known.count, "no token is left out"
        known.add(chosen_NLK[known.count - begin :])

    def _blocks(self, request_id: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens of a request are in the cache: blocks, and places in these."""
        assert self._group is not None, "a cache that keeps no whole requests has no prefixes of them"
        blocks, size = np.asarray(self._runner.requests[request_id].block_ids[self._group]), self._cached.shape[1]
        return blocks[places // size], places % size


def routed_experts(result: CompletionOutput, recorded: Callable[[int], np.ndarray] | None, count: int) -> np.ndarray:
    """Experts of all ``count`` tokens of a request and its answer but the last, [count, L, K].

    ``recorded``: gives them on a CPU, by their number. Errors: RuntimeError if vLLM does not say them of each token.
    """
    found = result.routed_experts if recorded is None else recorded(count)
    if found is None or len(found) != count:
        raise RuntimeError(f"vLLM gave the experts of {0 if found is None else len(found)} tokens, not of {count}")
    return found
