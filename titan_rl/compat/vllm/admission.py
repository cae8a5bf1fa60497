"""vLLM's scheduler: use of its KV cache, preemptions, and its limit of requests at once.

vLLM admits a waiting request while fewer than ``max_num_active_reqs`` run and the cache holds it. That number may be
set before each step; ``max_num_seqs`` stays the most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window
from vllm.v1.request import Request

from titan_rl.compat.reach import VLLM, Reach

_SCHEDULER, _REQUEST = "vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.request:Request"
_LOAD = "count what a request holds in the KV cache"
_REUSE = "fill the same blocks first, step after step"
REACHES = (
    Reach(f"{_SCHEDULER}.schedule", "set the limit before a step, and count after it"),
    Reach(f"{_SCHEDULER}.max_num_active_reqs", "limit the requests at once"),
    Reach(f"{_SCHEDULER}.max_num_running_reqs", "know the most requests at once"),
    Reach(f"{_SCHEDULER}.running", "count running requests"),
    Reach(f"{_SCHEDULER}.waiting", "see which request comes next"),
    Reach(f"{_SCHEDULER}.hash_block_size", "know which prompts share blocks"),
    Reach(f"{_SCHEDULER}.reset_preempted_req_ids", "leave out the preemptions of a weight update"),
    Reach("vllm.v1.core.sched.output:SchedulerOutput.preempted_req_ids", "count preemptions"),
    Reach("vllm.v1.core.kv_cache_manager:KVCacheManager.usage", "record the KV cache's usage"),
    Reach("vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool", _REUSE),
    Reach("vllm.v1.core.block_pool:BlockPool.free_block_queue", _REUSE),
    Reach("vllm.v1.core.block_pool:BlockPool.blocks", _REUSE),
    Reach("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", _REUSE),
    Reach("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", _REUSE),
    Reach("vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window", _LOAD),
    Reach(f"{_REQUEST}.block_hashes", "know which prompts share blocks"),
    Reach(f"{_REQUEST}.num_prompt_tokens", _LOAD),
    Reach(f"{_REQUEST}.num_tokens", _LOAD),
    Reach(f"{_REQUEST}.max_tokens", _LOAD),
)
VLLM.require(REACHES)


@dataclass(frozen=True)
class CacheShape:
    """Blocks of a KV cache, and how many tokens fill one."""

    num_blocks: int
    groups: Sequence[tuple[int, int | None]]
    """For each group of layers: tokens of a block, and the sliding window, if there is one."""


@dataclass(frozen=True)
class CacheLoad:
    """What a request holds in the KV cache, or would hold."""

    num_tokens: int
    """Of prompt and answer, up to now."""
    num_generated: int
    max_new_tokens: int
    prompt: bytes | str
    """Requests of which it is equal share the blocks that their prompts fill."""
    num_shared: int
    """Tokens in these blocks."""


Admit = Callable[[Sequence[CacheLoad], Sequence[CacheLoad]], int]
"""Running and waiting requests in, how many of the waiting ones to admit out."""


def cache_shape(scheduler: Scheduler) -> CacheShape:
    config = scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    groups = [(spec.block_size, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
    return CacheShape(config.num_blocks - 1, groups)  # vLLM keeps one block empty


@dataclass
class CacheUse:
    """What some steps of an engine made of its KV cache."""

    num_preemptions: int = 0
    """Requests that lost their keys and values for want of room."""
    usage_max: float = 0.0
    """Largest share of the cache that was held."""
    num_running: int = 0
    """Requests that ran, summed over steps."""


class CacheRecorder:
    """Recorder of a scheduler's KV cache, and owner of its limit of requests at once."""

    def __init__(self, scheduler: Scheduler, admit: Admit | None):
        """``admit``: asked before each step in which requests wait; None admits all that the cache holds now."""
        self._scheduler, self._admit, self._use = scheduler, admit, CacheUse()
        self._own_schedule = scheduler.schedule
        scheduler.schedule = self._schedule

    def take(self) -> CacheUse:
        """Use since the last call."""
        use, self._use = self._use, CacheUse()
        return use

    def reuse_first_blocks(self) -> None:
        """Fill the cache from its beginning again, if nobody holds any of it.

        vLLM takes what was free for longest, so that it soon has touched all pages of a cache of which it needs few."""
        pool = self._scheduler.kv_cache_manager.block_pool
        _null_block, *others = pool.blocks
        if pool.get_num_free_blocks() == len(others):
            pool.free_block_queue = FreeKVCacheBlockQueue(others)

    def _schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        scheduler = self._scheduler
        if self._admit is not None and scheduler.waiting:
            running = [self._load(request) for request in scheduler.running]
            room = scheduler.max_num_running_reqs - len(running)
            waiting = [self._load(request) for request in islice(scheduler.waiting, max(room, 0))]
            scheduler.max_num_active_reqs = len(running) + self._admit(running, waiting)
        num_reset = len(scheduler.reset_preempted_req_ids)
        step = self._own_schedule(throttle_prefills)
        use = self._use
        use.num_preemptions += len(step.preempted_req_ids or ()) - num_reset
        use.usage_max = max(use.usage_max, scheduler.kv_cache_manager.usage)
        use.num_running += len(step.num_scheduled_tokens)
        return step

    def _load(self, request: Request) -> CacheLoad:
        size = self._scheduler.hash_block_size
        num_full = (request.num_prompt_tokens - 1) // size  # the last token is computed for each request
        is_shared = 0 < num_full <= len(request.block_hashes)  # there are hashes where prefixes are cached
        return CacheLoad(
            num_tokens=request.num_tokens,
            num_generated=request.num_output_tokens,
            max_new_tokens=request.max_tokens,
            prompt=request.block_hashes[num_full - 1] if is_shared else request.request_id,
            num_shared=num_full * size if is_shared else 0,
        )
