"""Admission by the KV cache: the policy by hand, and a real engine whose cache is too small for its requests."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from started_meshes import meshes_of
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from titan_rl.compat.vllm.admission import CacheLoad, CacheRecorder, CacheShape
from titan_rl.data.types import EngineStatistics, Request
from titan_rl.generator.admission import AdmissionPolicy
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.metrics import cache_metrics

CACHE_GIB = 0.0025
"""40 blocks of 32 tokens: enough for 5 of the longest answers, of 32."""


def load(num_tokens: int, num_generated: int = 0, most: int = 100, prompt: str = "", num_shared: int = 0) -> CacheLoad:
    return CacheLoad(num_tokens, num_generated, most, prompt or f"{num_tokens} {num_generated}", num_shared)


def policy(num_blocks: int, lengths: tuple[int, ...] = (), window: int | None = None) -> AdmissionPolicy:
    made = AdmissionPolicy(CacheShape(num_blocks, [(10, window)]))
    for length in lengths:
        made.ended(length)
    return made


def test_an_empty_cache_is_filled_from_its_beginning_again():
    """vLLM itself goes on through all of it, and a CPU's would take all its memory."""
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=16)
    manager = SimpleNamespace(block_pool=pool)
    recorder = CacheRecorder(SimpleNamespace(kv_cache_manager=manager, schedule=None), None)

    def numbers_of(count: int) -> list[int]:
        """Of blocks that are taken, and filled with a prompt's keys and values."""
        held.extend(blocks := pool.get_new_blocks(count))
        for block in blocks:
            block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"%8d" % block.block_id), 0))
        return [block.block_id for block in blocks]

    def forget_prompts() -> None:
        pool.reset_prefix_cache()
        recorder.reuse_first_blocks()

    held = []
    assert numbers_of(3) == [1, 2, 3]
    pool.free_blocks(held)
    held.clear()
    assert numbers_of(2) == [4, 5]
    forget_prompts()
    assert numbers_of(1) == [6], "since somebody holds blocks"
    pool.free_blocks(held)
    held.clear()
    forget_prompts()
    assert numbers_of(9) == [*range(1, 10)] and not pool.get_num_free_blocks()


def test_what_requests_hold_is_counted_in_blocks():
    assert policy(9).peak([load(30)], 1) == 3
    assert policy(9).peak([load(31), load(8)], 1) == 4 + 1
    assert policy(9, window=20).peak([load(31)], 1) == 2


def test_equal_prompts_share_their_full_blocks():
    first, second = load(31, 6, prompt="a", num_shared=20), load(25, prompt="a", num_shared=20)
    assert policy(9).peak([first, second], 1) == 2 + 2 + 1
    assert policy(9).peak([first, load(25, prompt="b", num_shared=20)], 1) == 2 + 2 + 3


def test_answers_go_on_as_those_before_did():
    """Three blocks now, a fourth in 10 tokens, and a seventh in 40, where an answer goes on so long."""
    now = [load(21)]
    assert policy(9, (9,) * 9).peak(now, 41) == pytest.approx(3), "hardly any does"
    # 5 of 10 do that ended, and 0.6 of the one that has any length up to 100
    assert policy(9, (90,) * 5 + (9,) * 5).peak(now, 41) == pytest.approx(7 * 5.6 / 11)
    assert policy(9).peak(now, 41) == pytest.approx(7 * 0.6)


def test_no_answer_goes_on_beyond_its_limit():
    assert policy(9, (90,) * 9).peak([load(21, most=10)], 1000) == pytest.approx(3)


def test_requests_wait_until_they_fit_for_half_as_many_steps_as_they_have_tokens():
    """Of 20 tokens each: 10 steps, in which two blocks become three."""
    queue, long = [load(20, prompt=str(place)) for place in range(9)], (99,) * 9
    assert policy(9, long).num_admitted([], queue) == 3
    assert policy(9, long).num_admitted([load(20)], queue) == 2
    assert policy(9, long).num_admitted([load(80)], queue) == 0
    assert policy(99, long).num_admitted([], queue) == 9, "all, where there is room"
    assert policy(1, long).num_admitted([], queue) == 1, "one in any case, or none would ever run"
    assert policy(9).num_admitted([load(20)], []) == 0


def test_metrics_of_two_engines():
    first = EngineStatistics(num_steps=4, num_running=12, num_preemptions=2, kv_cache_usage_max=0.5)
    second = EngineStatistics(num_steps=2, num_running=12, kv_cache_usage_max=0.75)
    assert cache_metrics([first, second]) == {
        "preemptions": 2,
        "kv_cache_usage_max": 0.75,
        "running_requests_mean": 4.0,
    }
    assert cache_metrics([]) == {"preemptions": 0, "kv_cache_usage_max": 0.0, "running_requests_mean": 0.0}


@pytest.mark.slow
def test_an_engine_preempts_less_and_answers_the_same(tmp_path):
    make_tiny(tmp_path / "model", seed=1)
    requests = [Request(np.arange(10 + n, 50 + n, dtype=np.int32), list(range(8)), 200, 1.0) for n in range(4)]

    async def answers(adaptive: bool):
        generator = {"kv_cache_gib": CACHE_GIB, "adaptive_max_num_seqs": adaptive}
        parts = frozenset({"generators"})
        async with meshes_of(str(tmp_path / "model"), tmp_path, parts, generator=generator) as meshes:
            leader = meshes.generators.replicas[0].leader
            groups = await asyncio.gather(*(leader.generate.call_one(request) for request in requests))
            tokens = [answer.tokens.tolist() for group in groups for answer in group]
            return tokens, await leader.take_statistics.call_one()

    async def both():
        return await asyncio.gather(answers(False), answers(True))

    (fixed, of_fixed), (adaptive, of_adaptive) = asyncio.run(both())
    print(f"{of_fixed.num_preemptions} and {of_adaptive.num_preemptions} preemptions")
    assert fixed == adaptive
    assert 0 <= of_adaptive.num_preemptions < of_fixed.num_preemptions
    assert 0.9 < of_fixed.kv_cache_usage_max <= 1 and of_fixed.num_running > of_fixed.num_steps > 0
