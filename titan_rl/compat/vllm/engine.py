"""vLLM's engine in this process: its scheduler's counts, and where its executor finds the other ranks."""

import threading
from dataclasses import replace

from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from titan_rl.compat.reach import VLLM, DependencyChanged, Reach

_REQUEST = "vllm.v1.request:Request"
REACHES = (
    Reach("vllm.v1.engine.core_client:InprocClient.engine_core", "reach the scheduler of an engine in this process"),
    Reach("vllm.v1.engine.core:EngineCore.scheduler", "reach the scheduler of an engine in this process"),
    Reach("vllm.v1.core.sched.scheduler:Scheduler.requests", "find a running request"),
    Reach(f"{_REQUEST}.num_output_tokens", "count the tokens that a version generated"),
    Reach(f"{_REQUEST}.num_output_placeholders", "count the token of a step under way"),
    Reach(f"{_REQUEST}.num_stale_output_tokens", "count the token of a step under way, of a preempted request"),
    Reach(f"{_REQUEST}.drop_stale_output", "know whether such a token is dropped"),
    Reach(
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args",
        "name shared memory by the engine, and give a rank its own device",
    ),
    Reach("vllm.v1.executor.uniproc_executor:Lock", "lock within a process, and not by a semaphore in /dev/shm"),
)
VLLM.require(REACHES)

# one between processes would be a semaphore, whose name in /dev/shm outlives a process that is killed
uniproc_executor.Lock = threading.Lock  # pyright: ignore[reportPrivateImportUsage]


def scheduler_of(engine: LLMEngine) -> Scheduler:
    """The scheduler of an engine that runs in this process."""
    client = engine.engine_core
    assert isinstance(client, InprocClient), "the engine is in this process"
    scheduler = client.engine_core.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler


def num_generated(request: Request) -> int:
    """Tokens of a request, with the one that a step under way makes, which is the old weights' too."""
    is_preempted_under_way = request.num_stale_output_tokens > 0 and not request.drop_stale_output
    return request.num_output_tokens + (request.num_output_placeholders or int(is_preempted_under_way))


_CHECKED_BLOCKS = 64


def check_counts(scheduler: Scheduler) -> None:
    """Have a scheduler like this one count one request through a few steps, beside the engine.

    A counter of another meaning would name wrong versions of the weights without an error. Errors: DependencyChanged.
    """
    twin = type(scheduler)(
        vllm_config=scheduler.vllm_config,
        kv_cache_config=replace(
            scheduler.kv_cache_config, num_blocks=min(scheduler.kv_cache_config.num_blocks, _CHECKED_BLOCKS)
        ),
        structured_output_manager=scheduler.structured_output_manager,
        block_size=scheduler.block_size,
    )
    request = Request("counted", [0], SamplingParams(max_tokens=4), None)
    twin.add_request(request)
    _expect(request, 0, "was added")
    is_async = isinstance(twin, AsyncScheduler)
    step = twin.schedule()
    _expect(request, int(is_async), "was scheduled")  # without async scheduling no step is under way between two
    if is_async:
        twin.reset_prefix_cache(reset_running_requests=True)
        _expect(request, 0, "was preempted and its token dropped")
        twin.update_from_output(step, _one_token(request))
        _expect(request, 0, "had its dropped token delivered")
        step = twin.schedule()
        _expect(request, 1, "was scheduled again")
    twin.update_from_output(step, _one_token(request))
    _expect(request, 1, "had its token delivered")


def _one_token(request: Request) -> ModelRunnerOutput:
    name = request.request_id
    return ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[[0]])


def _expect(request: Request, count: int, when: str) -> None:
    if (counted := num_generated(request)) == count:
        return
    counters = ("num_output_tokens", "num_output_placeholders", "num_stale_output_tokens", "drop_stale_output")
    values = ", ".join(f"{name} = {getattr(request, name)}" for name in counters)
    raise DependencyChanged(
        f"{VLLM.name} {VLLM.version} counts {counted} tokens of a request that {when}, not {count} ({values}): "
        f"install {VLLM.name} {VLLM.series}"
    )


class OwnRankExecutor(ExecutorWithExternalLauncher):
    """One rank's worker of an engine whose ranks are processes that somebody else started."""

    def rank_arguments(self) -> tuple[str, int, int]:
        """How vLLM finds the process group, the rank, and the rank on this host."""
        raise NotImplementedError

    def _distributed_args(self) -> tuple[str, int, int]:
        return self.rank_arguments()
