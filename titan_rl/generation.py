"""A vLLM engine and the one thread that owns it.

Requests, weight updates and whatever else touches the engine are put into one queue and are done by that thread
between two engine steps: never while one runs.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from titan_rl.config import GeneratorConfig
from titan_rl.episode import Request
from titan_rl.mesh import vllm_transfer
from titan_rl.mesh.channel import WeightReader, WeightVersion
from titan_rl.types import Completion, EngineStatistics

_CPU_BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention takes: only whole blocks of a prompt are shared, and its default is 128."""
_PREFILL_TOKENS = 4096
"""Tokens of one engine step, unless a single prompt needs more."""


@dataclass(frozen=True)
class _Action:
    run: Callable[[], Any]
    future: Future
    answers_itself: bool
    """Whether the future is set later, by what ``run`` began."""
    fatal: bool
    """Whether the engine is beyond use if ``run`` fails: no generation on half-applied weights."""


@dataclass
class _Pending:
    """One request of several samples, until the last of them is done."""

    future: Future
    completions: list[Completion | None]
    left: int


@dataclass
class _Sample:
    pending: _Pending
    place: int
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(tokens made so far, policy version that makes the next ones), in order."""


def engine_arguments(config: GeneratorConfig, model_path: str | Path, max_model_len: int) -> EngineArgs:
    """vLLM's settings; log-probabilities are those of the distribution that was sampled from."""
    on_cpu = current_platform.is_cpu()
    memory: dict[str, Any] = (
        dict(kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30), block_size=_CPU_BLOCK_TOKENS)
        if on_cpu
        else dict(gpu_memory_utilization=config.gpu_memory_utilization)
    )
    return EngineArgs(
        model=str(model_path),
        dtype=config.dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=on_cpu,
        # vLLM 0.32 on a CPU crashes on a seeded request whose prompt is prefilled in parts: its generator cannot rewind
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(_PREFILL_TOKENS, max_model_len),
        async_scheduling=False,  # an update must know how many tokens each request has
        disable_log_stats=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        # bf16 logits are off by up to 1/16, a third of what trainer and sampler disagreed on
        hf_overrides={"head_dtype": "float32"},
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=vllm_transfer.BACKEND),
        **memory,
    )


class GenerationEngine:
    """Many callers, one engine. All methods may be called from any thread."""

    def __init__(self, arguments: EngineArgs, stop_token_ids: list[int]):
        vllm_transfer.register()
        self.stop_token_ids = stop_token_ids
        self.version = -1
        self.statistics = EngineStatistics()
        self._arguments = arguments
        self._inbox: queue.SimpleQueue[_Action] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}
        self._num_requests = 0
        self._posting = threading.Lock()
        self._broken: BaseException | None = None
        started: Future = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm engine", daemon=True)
        self._thread.start()
        started.result()

    # what callers may do

    def generate(self, request: Request) -> Future:
        """A future of list[Completion], one for each of the request's seeds."""
        finished: Future = Future()
        self._post(lambda: self._add(request, finished), finished, answers_itself=True)
        return finished

    def connect(self, reader: WeightReader) -> Future:
        return self._post(lambda: self._rpc("init_weight_transfer_engine", init_info=dict(reader=reader)))

    def update(self, reader: WeightReader, version: WeightVersion) -> Future:
        """Apply a fetched version between two steps; running requests keep their KV and go on under it.

        A future of the EngineStatistics of the version that it ends.
        """
        return self._post(lambda: self._apply(reader, version), fatal=True)

    def take_statistics(self) -> Future:
        """A future of the EngineStatistics since they were last taken, or the weights last updated."""
        return self._post(self._take_statistics)

    # what the engine's thread does

    def _post(
        self, run: Callable[[], Any], future: Future | None = None, *, answers_itself: bool = False, fatal: bool = False
    ) -> Future:
        action = _Action(run, future or Future(), answers_itself, fatal)
        with self._posting:  # so that nothing is put into the inbox of a thread that has just given up
            if self._broken is not None:
                raise RuntimeError("the vLLM engine has failed before") from self._broken
            action.future.set_running_or_notify_cancel()  # from now on only the engine's thread ends it
            self._inbox.put(action)
        return action.future

    def _run(self, started: Future) -> None:
        try:
            self._engine = LLMEngine.from_engine_args(self._arguments)
            started.set_result(None)
        except BaseException as error:  # whoever constructs us must hear of it
            started.set_exception(error)
            return
        try:
            while True:
                self._drain(wait=not self._engine.has_unfinished_requests())
                if self._engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:  # the engine is beyond use: every caller, now and later, must hear of it
            with self._posting:
                self._broken = error
            for pending in {id(s.pending): s.pending for s in self._samples.values()}.values():
                pending.future.set_exception(error)
            while not self._inbox.empty():
                self._inbox.get().future.set_exception(error)

    def _drain(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            wait = False
            action = self._inbox.get()
            try:
                value = action.run()
            except Exception as error:  # a caller's mistake is the caller's; the engine goes on
                action.future.set_exception(error)
                if action.fatal:
                    raise
            else:
                if not action.answers_itself:
                    action.future.set_result(value)

    def _add(self, request: Request, future: Future) -> None:
        pending = _Pending(future, [None] * len(request.seeds), len(request.seeds))
        tokens = request.tokens.tolist()
        for place, seed in enumerate(request.seeds):
            request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
            parameters = SamplingParams(
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                stop_token_ids=self.stop_token_ids,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(request_id, dict(prompt_token_ids=tokens), parameters)
            self._samples[request_id] = _Sample(pending, place, [(0, self.version)])

    def _step(self) -> None:
        start = time.perf_counter()
        for output in self._engine.step():
            if output.finished:
                self._finish(output)
        self.statistics.seconds_busy += time.perf_counter() - start
        self.statistics.num_steps += 1

    def _finish(self, output) -> None:
        sample = self._samples.pop(output.request_id)
        [result] = output.outputs
        count = len(result.token_ids)
        versions = np.empty(count, np.int32)
        for begin, version in sample.versions:
            versions[begin:] = version
        self.statistics.num_tokens += count
        pending = sample.pending
        pending.completions[sample.place] = Completion(
            tokens=np.asarray(result.token_ids, np.int32),
            logprobs=np.asarray(result.logprobs.logprobs, np.float32),
            versions=versions,
            stop_reason=result.finish_reason,
        )
        pending.left -= 1
        if not pending.left:
            pending.future.set_result(pending.completions)

    def _rpc(self, method: str, **kwargs) -> None:
        self._engine.engine_core.collective_rpc(method, None, (), kwargs)

    def _apply(self, reader: WeightReader, version: WeightVersion) -> EngineStatistics:
        start = time.perf_counter()
        self._rpc("start_weight_update")
        self._rpc("update_weights", update_info=dict(version=version))
        self._rpc("finish_weight_update")
        reader.confirm(version)
        self._engine.reset_prefix_cache()
        running = self._engine.engine_core.engine_core.scheduler.requests
        for request_id, sample in self._samples.items():
            sample.versions.append((running[request_id].num_output_tokens, version.version))
        self.version = version.version
        taken = self._take_statistics()
        taken.seconds_update = time.perf_counter() - start
        return taken

    def _take_statistics(self) -> EngineStatistics:
        taken, self.statistics = self.statistics, EngineStatistics()
        return taken
