"""A vLLM engine and the one thread that owns it.

Requests, weight updates and everything else that touches the engine go into one queue. That thread does them between
two engine steps, never during one.
"""

import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import titan_rl.compat.vllm.lean_import  # noqa: F401  # isort: skip  (before the rest of vLLM)
import numpy as np
from tqdm import tqdm
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform

import titan_rl.kernels.first_calls  # noqa: F401  (before the engine's tables are made)
from titan_rl.compat.vllm.admission import CacheRecorder, cache_shape
from titan_rl.compat.vllm.engine import check_counts, num_generated, scheduler_of
from titan_rl.compat.vllm.routing import RouteRecorder, routed_experts
from titan_rl.compat.vllm.sampling import give_tokenizer, keep_masks
from titan_rl.compat.vllm.speculation import DraftRecorder
from titan_rl.compat.vllm.thinking import limit_thinking
from titan_rl.compat.vllm.vision import register_without_torchvision
from titan_rl.config.model_directory.directory import read_object, stop_token_ids, stored_tensors
from titan_rl.config.model_directory.draft_heads import weights_of_head, weights_of_layers
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.images import UNLIMITED, image_processor
from titan_rl.data.spans import Spans
from titan_rl.data.storage.routed_experts import compact
from titan_rl.data.text.thinking import ThinkingTags, forced_closings, thinking_tags
from titan_rl.data.text.tokenizer import read_tokenizer
from titan_rl.data.types import Completion, Decoding, EngineStatistics, Request, RequestRefused
from titan_rl.generator.admission import AdmissionPolicy
from titan_rl.generator.draft_policy import DraftPolicy
from titan_rl.generator.engine_arguments import engine_arguments
from titan_rl.generator.engine_start import start_engine
from titan_rl.generator.lockstep import HEARTBEAT_SECONDS, Command, Lockstep
from titan_rl.generator.sleeping import fall_asleep, wake_cache, wake_weights
from titan_rl.generator.vllm_requests import (
    Pending,
    Sample,
    engine_prompt,
    prompt_logprobs,
    sampling_mask,
    sampling_parameters,
)
from titan_rl.generator.weights import vllm_backend, vllm_loader
from titan_rl.generator.weights.vllm_backend import load_version, transfer_engine
from titan_rl.generator.weights.vllm_recording import Recorded
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.processes.fault_injection import inject_fault


@dataclass(frozen=True)
class _Action:
    """A command, and the future that its caller waits for."""

    command: Command
    future: Future


def _readable(error: BaseException) -> BaseException:
    """Error that a process without the library it comes from can read: an actor's caller would wait for it forever."""
    if type(error).__module__.split(".")[0] in ("builtins", "titan_rl"):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class GenerationEngine:
    """One engine for many callers. All methods may be called from any thread.

    With tensor parallelism every rank has one of these, whose thread owns the rank's part of the model and a scheduler.
    Call rank 0's; the other ranks run the same commands (lockstep.py).
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model_path: str | Path,
        max_model_len: int,
        rank: int = 0,
        rendezvous_file: Path | None = None,
        devices: Sequence[int] = (),
        sleeps: bool = False,
        records_routing: bool = False,
        invariant_parts: int = 0,
        images: ImagesConfig = UNLIMITED,
    ):
        """``rendezvous_file``: where the ranks of a tensor-parallel engine find each other; it must not exist yet.
        ``devices``: as in ``engine_arguments``. ``sleeps``: whether ``sleep`` will be called.
        ``records_routing``: whether requests may ask for routed experts. ``invariant_parts``, ``images``: as there."""
        tqdm.set_lock(threading.RLock())  # its own is a semaphore in /dev/shm, which a killed process leaves there
        vllm_backend.register()
        vllm_loader.register()
        self._images = image_processor(model_path, images)
        most_tokens = 0 if self._images is None else min(self._images.most_tokens, max_model_len)
        register_without_torchvision(read_object(Path(model_path) / "config.json")["model_type"], most_tokens)
        self.version, self._rank, self._rendezvous_file = -1, rank, rendezvous_file
        self._num_updates = 0
        self.reader: WeightReader | None = None
        self.statistics, self._spans = EngineStatistics(), Spans()
        self._config, self._model_path = config, Path(model_path)
        modes = sleeps, records_routing, invariant_parts, images
        self._arguments = engine_arguments(config, model_path, max_model_len, devices, *modes)
        self._devices, self._is_asleep, self._reads_text = devices, False, False
        self._awake_since = time.monotonic()
        self._records_routing = records_routing
        self._routes: RouteRecorder | None = None
        """Of routed experts, on a CPU."""
        self._admission: AdmissionPolicy | None = None
        """If requests at once are limited by the KV cache."""
        self._drafts: DraftRecorder | None = None
        self._draft_policy: DraftPolicy | None = None
        """Of the rank that decides, if drafts are left out where they cost time."""
        self._tags: ThinkingTags | None = None
        """Of thinking, once a request has a budget for it."""
        self.stop_token_ids = stop_token_ids(self._model_path)
        self._inbox: queue.SimpleQueue[_Action] = queue.SimpleQueue()
        self._held_back: deque[_Action] = deque()
        self._at_hand: list[_Action] = []
        """Taken from the two above, and not all answered yet."""
        self._samples: dict[str, Sample] = {}
        self._num_requests = 0
        self._posting = threading.Lock()
        self._broken: BaseException | None = None
        started: Future = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm engine", daemon=True)
        self._thread.start()
        self.recorded: list[Recorded] = started.result()

    # for callers

    def generate(self, request: Request) -> Future:
        """A future of list[Completion], one per seed of the request."""
        return self._post(Command("add", (request,)))

    def abort(self, request_id: str) -> Future:
        """Abort a request, if it is under way."""
        return self._post(Command("abort", (request_id,)))

    def connect(self, setup: ReaderSetup) -> WeightReader:
        """Connect this rank to the channel: before the first update, and again after the trainer has restarted."""
        if self.reader is not None:
            self.reader.close()
        self.on_worker("init_weight_transfer_engine", init_info=dict(setups={get_tensor_model_parallel_rank(): setup}))
        self.reader = reader = self.on_worker(transfer_engine).reader
        if self._is_asleep:
            reader.let_go()
        return reader

    @property
    def bytes_stored(self) -> int:
        return self.on_worker(transfer_engine).bytes_stored

    @property
    def seconds_awake(self) -> float:
        """Seconds since it last slept; 0 while it sleeps."""
        return 0.0 if self._is_asleep else time.monotonic() - self._awake_since

    def misquantized(self) -> list[str]:
        """Layers of this rank that multiply in FP8 by something else than the version's weights."""
        return self.on_worker(lambda worker: transfer_engine(worker).misquantized())

    def apply(self, version: int) -> Future:
        """Apply a version that all ranks have fetched, between two steps.

        If the config says ``drain``, running requests finish first; otherwise they continue under the new version, with
        their old or a new KV cache. A future of the EngineStatistics under the version before.
        """
        return self._post(Command("apply", (version,)))

    def sleep(self) -> Future:
        """Release weights and KV until the next update.

        Running requests are preempted, and resume with recomputed KV.
        """
        return self._post(Command("sleep"))

    def take_statistics(self) -> Future:
        """A future of the EngineStatistics since the last call, or since the last weight update."""
        return self._post(Command("take_statistics"))

    # on the engine's thread

    def _post(self, command: Command) -> Future:
        action = _Action(command, Future())
        with self._posting:  # nothing may enter the inbox after the thread has given up
            if self._broken is not None:
                why = f"{type(self._broken).__name__}: {self._broken}"
                raise RuntimeError(f"the vLLM engine failed: {why}") from self._broken
            action.future.set_running_or_notify_cancel()  # from now on only the engine's thread completes it
            self._inbox.put(action)
        return action.future

    def _run(self, started: Future) -> None:
        try:
            self._engine = start_engine(self._config, self._arguments, self._rank, self._rendezvous_file, self._devices)
            check_counts(scheduler_of(self._engine))
            if self._records_routing and current_platform.is_cpu():
                scheduler = scheduler_of(self._engine)
                self._routes = self.on_worker(lambda worker: RouteRecorder(scheduler, worker.model_runner))
            self._lockstep = Lockstep(self._config.tensor_parallel)
            self._start_admission()
            self._start_speculation()
            started.set_result(self.on_worker(self._record_needs))
        except BaseException as error:  # raised in the constructor, which waits for this future
            started.set_exception(_readable(error))
            return
        try:
            self._lead() if self._lockstep.is_leader else self._follow()
        except BaseException as error:  # the engine is unusable: every present and later caller must get the error
            traceback.print_exc()
            if not self._lockstep.is_leader:
                os._exit(1)  # nothing calls a follower: the other ranks notice its death
            self._break(error)

    def _record_needs(self, worker: Any) -> list[Recorded]:
        stored = [stored_tensors(self._model_path)]
        if path := self._config.speculative.model:
            stored.append(weights_of_head(stored_tensors(path)))
        elif self._config.speculative.method == "mtp":
            stored.append(weights_of_layers(self._model_path))
        shapes = [[(name, tensor.shape) for name, tensor in tensors.items()] for tensors in stored]
        return transfer_engine(worker).record_needs(shapes[0], worker.get_draft_model(), *shapes[1:])

    def _start_admission(self) -> None:
        scheduler = scheduler_of(self._engine)
        if self._config.adaptive_max_num_seqs:
            self._admission = AdmissionPolicy(cache_shape(scheduler))
        self._cache = CacheRecorder(scheduler, self._admission.num_admitted if self._admission else None)

    def _start_speculation(self) -> None:
        settings = self._config.speculative
        if settings.method == "none":
            return
        self._drafts = DraftRecorder(scheduler_of(self._engine))
        if settings.adaptive and self._lockstep.is_leader:
            self._draft_policy = DraftPolicy(settings.num_speculative_tokens)

    def _break(self, error: BaseException) -> None:
        with self._posting:
            self._broken = error
        waiting = [sample.pending.future for sample in self._samples.values()]
        waiting += [action.future for action in (*self._at_hand, *self._held_back)]
        while not self._inbox.empty():
            waiting.append(self._inbox.get().future)
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _lead(self) -> None:
        while True:
            self._at_hand = self._next_actions()
            self._lockstep.share([action.command for action in self._at_hand])
            for action in self._at_hand:
                self._answer(action)
            self._step()

    def _follow(self) -> None:
        while True:
            for command in self._lockstep.receive():
                self._answer(_Action(command, Future()))
            self._step()

    def _next_actions(self) -> list[_Action]:
        """What to do before the next step. Waits if nothing can run, but at most for a heartbeat."""
        busy = self._can_step()
        try:
            if not busy and not self._held_back:
                self._held_back.append(self._inbox.get(timeout=HEARTBEAT_SECONDS))
            while True:
                self._held_back.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        actions: list[_Action] = []
        while self._held_back:
            kind = self._held_back[0].command.name
            if kind == "apply" and busy and self._config.update == "drain":
                break  # it waits for the running requests, and later actions wait for it
            busy |= kind == "add"
            actions.append(self._held_back.popleft())
        return actions

    def _answer(self, action: _Action) -> None:
        command, future = action.command, action.future
        if command.name == "add":
            [request] = command.arguments
            self._add(request, future)
            return
        try:
            future.set_result(getattr(self, f"_{command.name}")(*command.arguments))
        except BaseException as error:
            future.set_exception(error)
            raise

    def _add(self, request: Request, future: Future) -> None:
        pending = Pending(request.id, future, [None] * len(request.seeds), len(request.seeds))
        # a block of the prefix cache must be found only under the weights that computed it; the version alone does not
        # identify them, since a run that goes back to a checkpoint makes the later versions again
        salt = f"{self.version}.{self._num_updates}"
        prompt = None
        for place, seed in enumerate(request.seeds):
            request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
            try:
                request.check(num_words := self._engine.model_config.get_vocab_size())
                self._prepare(request.decoding)
                if request.routed_experts and not self._records_routing:
                    raise ValueError("routed experts are asked for, and the engine does not record them")
                prompt = prompt or engine_prompt(request, self._images, salt)
                parameters = sampling_parameters(request, seed, self.stop_token_ids)
                engine_id = self._engine.add_request(request_id, prompt, parameters)
            except Exception as error:  # a wrong request, of whatever kind, fails for its caller; the engine continues
                if not future.done():
                    future.set_exception(RequestRefused(f"{type(error).__name__}: {error}"))
                return
            masked_words = num_words if request.decoding.truncates and request.temperature else 0  # greedy cuts nothing
            settings = masked_words, request.decoding
            versions = [(0, self.version)]
            self._samples[request_id] = Sample(pending, place, engine_id, *settings, request.routed_experts, versions)

    def _prepare(self, decoding: Decoding) -> None:
        """Have the engine do what it does not do from the start, since most runs want none of it.

        Errors: ValueError for what it cannot do."""
        if self._drafts is not None and (decoding.truncates or decoding.penalties or decoding.thinking_budget):
            raise ValueError("drafts are checked without top-p, top-k, min-p, penalties and budgets for thinking")
        if decoding.truncates:
            keep_masks(scheduler_of(self._engine), self.on_worker(lambda worker: worker.model_runner))
        if decoding.stop and not self._reads_text:
            give_tokenizer(self._engine, read_tokenizer(self._model_path))
            self._reads_text = True
        if decoding.thinking_budget and self._tags is None:
            if (tags := thinking_tags(read_tokenizer(self._model_path))) is None:
                raise ValueError("a budget for thinking, and the tokenizer has no tokens that open and close it")
            limit_thinking(self._engine, self.on_worker(lambda worker: worker.model_runner), *tags)
            self._tags = tags

    def _abort(self, request_id: str) -> None:
        aborted = [name for name, sample in self._samples.items() if request_id and sample.pending.id == request_id]
        for name in aborted:
            sample = self._samples.pop(name)
            self._engine.abort_request([sample.engine_id], internal=True)
            if not sample.pending.future.done():
                sample.pending.future.set_exception(RequestRefused("its caller has aborted it"))

    def _can_step(self) -> bool:
        return not self._is_asleep and self._engine.has_unfinished_requests()

    def _step(self) -> None:
        if not self._can_step():
            return
        inject_fault()
        start = time.perf_counter()
        for output in self._engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput), "the engine generates"
                self._finish(output)
        seconds = time.perf_counter() - start
        self.statistics.seconds_busy += seconds
        self._spans.add("generate", time.time() - seconds, seconds)
        self.statistics.num_steps += 1
        use = self._cache.take()
        self.statistics.num_preemptions += use.num_preemptions
        self.statistics.kv_cache_usage_max = max(self.statistics.kv_cache_usage_max, use.usage_max)
        self.statistics.num_running += use.num_running
        if self._drafts is not None:
            self._count_drafts(self._drafts, seconds)

    def _count_drafts(self, drafts: DraftRecorder, seconds: float) -> None:
        for step in drafts.take():
            self.statistics.num_drafted += step.num_drafted
            self.statistics.num_accepted += step.num_accepted
            if self._draft_policy is None or not step.is_decode:
                continue
            if change := self._draft_policy.measured(step.batch, step.limit, seconds, step.num_tokens):
                self._held_back.append(_Action(Command("limit_drafts", change), Future()))  # all ranks draft alike

    def _limit_drafts(self, batch_sizes: range, num_tokens: int) -> None:
        assert self._drafts is not None, "there are drafts"
        self._drafts.limit(batch_sizes, num_tokens)

    def _finish(self, output: RequestOutput) -> None:
        sample = self._samples.pop(output.request_id)
        [result] = output.outputs
        assert isinstance(result.logprobs, FlatLogprobs) and output.prompt_token_ids is not None
        assert result.finish_reason is not None, "it has finished"
        count = len(result.token_ids)
        versions = np.empty(count, np.int32)
        for begin, version in sample.versions:
            versions[begin:] = version
        if self._admission is not None:
            self._admission.ended(count)
        self.statistics.add(count, len(output.prompt_token_ids), output.num_cached_tokens or 0)
        pending = sample.pending
        pending.completions[sample.place] = Completion(
            tokens=np.asarray(result.token_ids, np.int32),
            logprobs=np.asarray(result.logprobs.logprobs, np.float32),
            versions=versions,
            # vLLM names the text that ended an answer, or the token
            stop_reason="stop_string" if isinstance(result.stop_reason, str) else result.finish_reason,
            mask=sampling_mask(result, sample.masked_words),
            penalties=sample.decoding.penalties,
            forced=self._forced(output, sample.decoding),
            prompt_logprobs=None if sample.place else prompt_logprobs(output),
            routed_experts=self._routed_experts(output, sample) if sample.records_routing else None,
        )
        pending.left -= 1
        if not pending.left and not pending.future.done():
            pending.future.set_result(pending.completions)

    def _routed_experts(self, output: RequestOutput, sample: Sample) -> np.ndarray:
        [result] = output.outputs
        assert output.prompt_token_ids is not None
        count = len(output.prompt_token_ids) + len(result.token_ids) - 1
        recorded = partial(self._routes.take, sample.engine_id) if self._routes else None
        return compact(routed_experts(result, recorded, count), self._engine.model_config.get_num_experts())

    def _forced(self, output: RequestOutput, decoding: Decoding) -> np.ndarray | None:
        """Tokens that a budget forced; of an answer with numbers that are not finite, which the trainer names, none.

        Errors: RuntimeError if vLLM did not keep to it."""
        if not decoding.thinking_budget or self._tags is None:
            return None
        [result] = output.outputs
        assert isinstance(result.logprobs, FlatLogprobs)
        if not np.isfinite(result.logprobs.logprobs).all():  # what is drawn from NaN is not what was forced
            return None
        prompt, answer = np.asarray(output.prompt_token_ids), np.asarray(result.token_ids)
        try:
            forced = forced_closings(prompt, answer, self._tags, decoding.thinking_budget)
        except ValueError as error:
            raise RuntimeError(f"vLLM did not close thinking: {error}") from None
        return forced if forced.any() else None

    def on_worker(self, method: str | Callable[..., Any], **kwargs: Any) -> Any:
        """Call a method of this rank's vLLM worker, or a function with the worker as its argument."""
        return self._engine.engine_core.collective_rpc(method, None, (), kwargs)[0]

    def _apply(self, version: int) -> EngineStatistics:
        start = time.perf_counter()
        inject_fault("wake")
        self._lockstep.together(lambda: self._load(version))
        if self._config.kv == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        if current_platform.is_cpu():  # a GPU's cache has its memory anyway
            self._cache.reuse_first_blocks()
        if self._images is not None:
            self._engine.reset_encoder_cache()  # no image is seen by former weights from now on
        scheduler = scheduler_of(self._engine)
        for sample in self._samples.values():
            sample.versions.append((num_generated(scheduler.requests[sample.engine_id]), version))
        self.version, self._num_updates = version, self._num_updates + 1
        statistics = self._take_statistics()
        statistics.seconds_update = seconds = time.perf_counter() - start
        self._spans.add("take the weights", time.time() - seconds, seconds)
        statistics.spans = self._spans.take()
        return statistics

    def _load(self, version: int) -> None:
        if self._is_asleep:
            self.on_worker(wake_weights)
        self.on_worker(load_version, version=version)
        if self._is_asleep:
            self.on_worker(wake_cache)
            self._is_asleep, self._awake_since = False, time.monotonic()

    def _sleep(self) -> None:
        inject_fault("sleep")
        if not self._is_asleep:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._lockstep.together(lambda: self.on_worker(fall_asleep))
            self._is_asleep = True
        if self.reader is not None:  # which may hold a version that was never applied
            self.reader.let_go()

    def _take_statistics(self) -> EngineStatistics:
        finished, self.statistics = self.statistics, EngineStatistics()
        return finished
