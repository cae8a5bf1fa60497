"""The bound on staleness holds whoever is fast or slow, and nobody waits for ever."""

import asyncio
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import eventually

from titan_rl.config.sections.schema import Config, RolloutConfig
from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.loop.rollout_queue import RolloutQueue
from titan_rl.data.types import Decoding, Group, Prompt, Rollout
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures
from titan_rl.mesh.control.weight_sync import WeightSync


def simulate(seed: int, groups_per_step: int, max_staleness: int, start: int, num_steps: int = 30) -> list[int]:
    """The lag of each trained group, with admission at random moments and random discards, trained in order."""
    chance = random.Random(seed)
    admission = Admission(groups_per_step, max_staleness, start)
    in_flight: deque[int] = deque()
    lags: list[int] = []

    def admit(at_most: int) -> None:
        while admission.can_admit() and at_most:
            admission.admit()
            in_flight.append(version)
            at_most -= 1

    for version in range(start, start + num_steps):
        admission.advance(version)
        batch = 0
        while batch < groups_per_step:
            admit(chance.randrange(groups_per_step + 1))
            if not in_flight:
                assert admission.can_admit(), "nobody is in flight and nobody may be admitted"
                continue
            admitted_under = in_flight.popleft()
            if chance.random() < 0.2:
                admission.give_back()
                continue
            lags.append(version - admitted_under)
            batch += 1
        admit(chance.randrange(3 * groups_per_step))
    return lags


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("groups_per_step", [1, 4])
def test_no_group_lags_behind_the_bound(groups_per_step, max_staleness, start):
    lags = [lag for seed in range(20) for lag in simulate(seed, groups_per_step, max_staleness, start)]
    assert min(lags) >= 0
    assert max(lags) == max_staleness


def test_slots_are_those_of_the_next_steps():
    admission = Admission(groups_per_step=4, max_staleness=1)
    admission.advance(0)
    assert admission.num_free == 8
    for _ in range(8):
        admission.admit()
    assert not admission.can_admit()
    with pytest.raises(AssertionError):
        admission.admit()
    admission.give_back()
    assert admission.num_free == 1
    admission.advance(1)
    assert admission.num_free == 5


def test_on_policy_admits_one_batch_at_a_time():
    admission = Admission(groups_per_step=3, max_staleness=0, version=5)
    admission.advance(5)
    assert admission.num_free == 3


class Weights(WeightSync):
    """Generators that take a moment to take a version."""

    def __init__(self) -> None:
        super().__init__(*[None] * 5)
        self.live = -1

    async def stage(self, version: int) -> None:
        pass

    async def announce(self, version: int) -> list:
        await asyncio.sleep(0.01)
        self.live = version
        return []


class Sampler:
    def __init__(self, weights: Weights):
        self.weights, self.asked_under, self.faults = weights, [], ConsecutiveFailures()
        self.sampling = None

    async def run_group(self, prompt, sampling) -> Group:
        self.sampling = sampling
        self.asked_under.append(self.weights.live)
        arrays = np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1)
        return Group(prompt.id, [Rollout(prompt.id, k, *arrays, [], "ok", reward=float(k)) for k in (0, 1)])


def make_queue(max_staleness: int) -> tuple[RolloutQueue, Sampler]:
    """Of two groups a step."""
    config = Config(rollout=RolloutConfig(prompts_per_step=2, group_size=2, max_staleness=max_staleness))
    ledger = SimpleNamespace(settle=lambda *_: None, count_retry=None)
    sampler = Sampler(weights := Weights())
    admission = Admission(2, max_staleness)
    queue = RolloutQueue(
        *(config, iter([]), ledger, sampler, admission, weights), max_tokens=64, on_score_failed=lambda *_: None
    )
    return queue, sampler


async def send(queue: RolloutQueue, version: int) -> None:
    """As the controller does: a version that is live lets more groups be admitted."""
    await queue.weights.send(version, lambda statistics, seconds: queue.admission.advance(version))


def prompts(count: int) -> deque[Prompt]:
    return deque(Prompt(f"train/{number}", "", "", {}) for number in range(count))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_goes_on_samples_nothing_under_what_its_generators_held_before(max_staleness):
    """They take the version of a resumed run, or of one that went back, while its prompts wait already."""
    count = 2 + 2 * max_staleness
    queue, sampler = make_queue(max_staleness)

    async def go_on() -> None:
        for version in (8, 5):
            queue.restart(prompts(count), version)
            await send(queue, version)
            await queue.collect()

    asyncio.run(go_on())
    assert sampler.asked_under == [8] * count + [5] * count


def test_answers_are_sampled_with_the_runs_decoding_settings():
    queue, sampler = make_queue(0)
    settings = dict(top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1, presence_penalty=1, frequency_penalty=-1)
    settings["thinking_budget"] = 8
    queue.config.rollout = replace(queue.config.rollout, **settings, stop=["Q:"])

    async def collect() -> None:
        queue.restart(prompts(2), 0)
        await send(queue, 0)
        await queue.collect()

    asyncio.run(collect())
    assert sampler.sampling.decoding == Decoding(**settings, stop=("Q:",))


def test_a_batch_that_was_ready_keeps_no_other_from_being_sampled():
    """The next one is collected before the version is live; what that version admits is sampled beside its training."""
    queue, sampler = make_queue(1)

    async def collect_two() -> None:
        queue.restart(prompts(8), 0)
        await send(queue, 0)
        await queue.collect()
        await eventually(lambda: all(each.group.done() for each in queue._in_flight), "the end of all sampling")
        await send(queue, 1)
        await queue.collect()
        assert sampler.asked_under == [0] * 4
        await queue.weights.until_live()
        await asyncio.sleep(0.01)
        assert sampler.asked_under == [0] * 4 + [1] * 2

    asyncio.run(collect_two())
