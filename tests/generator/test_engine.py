"""Requests that vLLM does not take, and all others when an engine fails. vLLM's own part is faked."""

import mmap
import queue
import threading
from collections import deque
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs

from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.text.thinking import ThinkingTags
from titan_rl.data.types import Decoding, EngineStatistics, Request, RequestRefused
from titan_rl.generator import engine as engine_module
from titan_rl.generator import engine_start
from titan_rl.generator.engine import GenerationEngine
from titan_rl.generator.lockstep import Lockstep
from titan_rl.generator.ranks import reserve_shared_memory
from titan_rl.mesh.resources.released_memory import ZerosOnDemand


class FakeEngine:
    """Takes requests and never runs one."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 64)

    def __init__(self):
        self.taken: list[SamplingParams] = []
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt, parameters: SamplingParams) -> str:
        self.taken.append(parameters)
        return request_id

    def abort_request(self, request_ids: list[str], internal: bool) -> None:
        self.aborted += request_ids

    def has_unfinished_requests(self) -> bool:
        return False


def make_engine() -> GenerationEngine:
    made = object.__new__(GenerationEngine)
    made.version, made._num_updates, made._num_requests = 0, 0, 0
    made.statistics, made._samples, made.stop_token_ids = EngineStatistics(), {}, [0]
    made._config, made._is_asleep, made._broken = GeneratorConfig(), False, None
    made._inbox, made._held_back, made._at_hand = queue.SimpleQueue(), deque(), []
    made._drafts = made._images = None
    made._posting, made._lockstep, made._engine = threading.Lock(), Lockstep(1), FakeEngine()
    return made


def ask(temperature: float, seeds: tuple[int, ...] = (1,), token: int = 3) -> Request:
    return Request(np.asarray([token], np.int32), list(seeds), 4, temperature)


def lead(made: GenerationEngine) -> None:
    """Until it fails, as the engine's thread does."""
    try:
        made._lead()
    except ZeroDivisionError as error:
        made._break(error)


def test_a_setting_beyond_vllms_limits_is_refused_and_the_engine_lives(monkeypatch):
    made = make_engine()
    futures = [made.generate(ask(2.5)), made.generate(ask(-1.0)), made.generate(ask(1.0, token=99))]
    good = made.generate(ask(1.0, (1, 2)))
    monkeypatch.setattr(made, "_step", lambda: 1 / 0)  # ends its loop
    lead(made)
    for future, words in zip(futures, ("got 2.5", "got -1.0", "vocabulary of 64"), strict=True):
        with pytest.raises(RequestRefused, match=words):
            future.result(5)
    assert [parameters.seed for parameters in made._engine.taken] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        good.result(5)


def test_whoever_waits_for_an_engine_that_fails_is_told_why(monkeypatch):
    """Those behind the request that it fails of too, and those who ask later: none waits for its deadline."""
    made = make_engine()
    futures = [made.generate(ask(1.0)) for _ in range(3)]

    def fail(request, future):
        raise ZeroDivisionError("what it died of")

    monkeypatch.setattr(made, "_add", fail)
    lead(made)
    for future in futures:
        with pytest.raises(ZeroDivisionError, match="what it died of"):
            future.result(5)
    with pytest.raises(RuntimeError, match="the vLLM engine failed: ZeroDivisionError: what it died of"):
        made.generate(ask(1.0))


def test_a_request_that_is_aborted_ends_alone(monkeypatch):
    made = make_engine()
    ended, other, nameless = (
        made.generate(replace(ask(1.0, seeds), id=name)) for seeds, name in (((1, 2), "a"), ((3,), "b"), ((4,), ""))
    )
    for name in ("a", "a", "unknown", ""):
        made.abort(name)
    monkeypatch.setattr(made, "_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made._lead()
    with pytest.raises(RequestRefused, match="aborted"):
        ended.result(5)
    assert not other.done() and not nameless.done() and made._engine.aborted == ["0", "1"]


def test_what_vllm_is_told_of_a_sample():
    told = engine_module.sampling_parameters(ask(0.7), 11, [0, 2])
    assert (told.temperature, told.seed, told.max_tokens, told.logprobs) == (0.7, 11, 4, 0)
    assert told.top_p == 1.0 and told.top_k == 0 and told.min_p == 0.0 and told.repetition_penalty == 1.0
    assert told.stop_token_ids == [0, 2] and told.flat_logprobs and not told.detokenize


def test_pages_of_shared_memory_are_had_before_others_can_take_them():
    """A segment that is only as long as it should be ends the process where /dev/shm is full at its first write."""
    segment = SharedMemory(create=True, size=1 << 20)
    try:
        file = Path("/dev/shm") / segment.name
        assert file.stat().st_blocks == 0
        reserve_shared_memory()
        assert file.stat().st_blocks * 512 >= 1 << 20
    finally:
        segment.close()
        segment.unlink()


def test_large_zeros_take_memory_as_they_are_written_to():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    with ZerosOnDemand():
        cache = torch.zeros(1 << 20, 256, dtype=torch.float32, device="cpu")
        small = torch.zeros((3, 2), dtype=torch.int32)
        ones = torch.zeros(1 << 24, requires_grad=True) + 1
        assert torch.zeros(1 << 24, device="meta").is_meta, "another device's are torch's own"
    assert resident() - before < cache.nbytes // 2
    assert cache.shape == (1 << 20, 256) and cache.dtype == torch.float32 and not cache[::4096].any()
    cache[7] = 1.0
    assert cache.sum() == 256 and ones.requires_grad and torch.equal(small, torch.zeros(3, 2, dtype=torch.int32))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_mode_of_functions_is_on_where_an_engine_may_compile_its_model(monkeypatch, on_cpu):
    seen = []

    class Mode(ZerosOnDemand):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    for name in ("guard_gloo", "inspect_models_here", "rebind_kernels_of_vllm"):
        monkeypatch.setattr(engine_start, name, lambda: None)
    monkeypatch.setattr(engine_start, "ZerosOnDemand", Mode)
    monkeypatch.setattr(engine_start, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(engine_start, "LLMEngine", SimpleNamespace(from_engine_args=torch.zeros))
    engine_start.start_engine(GeneratorConfig(), 1, 0, None, ())
    assert (torch.zeros in seen) == on_cpu


@pytest.mark.parametrize(
    ("answer", "logprobs", "forced"),
    [
        ([6, 2, 9], [-1.0, 0.0, -1.0], [False, True, False]),
        ([6, 7, 0], [-1.0, np.nan, np.nan], None),  # drawn from NaN, whatever was forced: the trainer names it
        ([6, 2, 9], [-1.0, 0.0, np.nan], None),
    ],
)
def test_an_answer_that_is_not_finite_is_left_to_the_trainer(answer, logprobs, forced):
    found = forced_of(answer, logprobs)
    assert forced is None if found is None else found.tolist() == forced


def test_an_engine_that_does_not_close_thinking_fails():
    with pytest.raises(RuntimeError, match="vLLM did not close thinking: token 1 of an answer goes on"):
        forced_of([6, 7, 0], [-1.0, -1.0, -1.0])


def forced_of(answer: list[int], logprobs: list[float]) -> np.ndarray | None:
    made = make_engine()
    made._tags = ThinkingTags(1, 2)
    numbers = FlatLogprobs(logprobs=logprobs)
    output = SimpleNamespace(prompt_token_ids=[5, 1], outputs=[SimpleNamespace(token_ids=answer, logprobs=numbers)])
    return made._forced(output, Decoding(thinking_budget=1))
