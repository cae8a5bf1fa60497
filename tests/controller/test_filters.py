"""Filtered groups are replaced in the order of admission, counted by reason, within a bound, whoever is faster."""

import asyncio
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import running

from titan_rl import cli
from titan_rl.algorithms.batches.batching import FILTER_REASONS, Selection, filter_reason, update_parts
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import AlgorithmConfig, Config, FilterConfig, RolloutConfig
from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.loop.rollout_queue import RolloutQueue
from titan_rl.data.types import Group, Prompt, Rollout
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures
from titan_rl.records.ledger.audit import flaws
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.steps.rollouts import read_rollouts

SAMPLES = 4


def rollout(name: str, sample: int, reward: float, status: str = "ok") -> Rollout:
    return Rollout(name, sample, np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1), [], status, reward=reward)


def group(rewards, status="ok", name="a") -> Group:
    return Group(name, [rollout(name, sample, reward, status) for sample, reward in enumerate(rewards)])


@pytest.mark.parametrize(
    ("wanted", "rewards", "reason"),
    [
        (dict(), [0, 0, 0, 0], None),
        (dict(no_signal=True), [0, 0, 0, 0], "no_signal"),
        (dict(no_signal=True), [1, 1, 1, 1], "no_signal"),
        (dict(no_signal=True), [0.5, 0.5, 0.5, 0.5], "no_signal"),
        (dict(no_signal=True), [0, 0.25, 0, 0], None),
        (dict(min_pass_rate=0.5), [1, 0, 0, 0], "too_hard"),
        (dict(min_pass_rate=0.5), [1, 1, 0, 0], None),
        (dict(max_pass_rate=0.5), [1, 1, 0, 0], None),
        (dict(max_pass_rate=0.5), [1, 1, 1, 0], "too_easy"),
        (dict(max_pass_rate=0.5, no_signal=True), [1, 1, 1, 1], "too_easy"),
        (dict(min_pass_rate=0.1), [0.9, 0.9, 0.5, 0], "too_hard"),
    ],
)
def test_who_is_left_out(wanted, rewards, reason):
    assert filter_reason(group(rewards), FilterConfig(**wanted)) == reason


def test_truncated_samples_count_whether_or_not_they_are_trained_on():
    """DAPO's dynamic sampling counts all of a group's answers (arXiv 2503.14476, equation 11)."""
    mixed = Group("a", [rollout("a", 0, 1.0, "truncated"), *group([0, 0, 0]).rollouts[1:]])
    wanted = FilterConfig(no_signal=True, all_truncated=True)
    assert filter_reason(mixed, wanted) is None
    for limit in ("truncated", "max_turns"):
        assert filter_reason(group([0, 1, 0, 1], limit), wanted) == "all_truncated"


def test_a_sample_of_the_machinery_says_nothing_about_a_group():
    failed = Group("a", [rollout("a", 0, 1.0, "timeout"), *group([0, 0, 0]).rollouts[1:]])
    assert filter_reason(failed, FilterConfig(no_signal=True)) == "no_signal"


def config_of(size=4, updates=1, staleness=0, **wanted) -> Config:
    wanted = dict(no_signal=True, max_refills=2) | wanted
    return Config(
        rollout=RolloutConfig(prompts_per_step=size, group_size=SAMPLES, max_staleness=staleness),
        algorithm=AlgorithmConfig(updates_per_batch=updates),
        filter=FilterConfig(**wanted),
    )


def select(has_signal: list[bool], config: Config) -> tuple[list[int], list[int]]:
    """Numbers of the groups that are chosen and filtered."""
    selection, numbers = Selection(config), iter(range(len(has_signal)))
    while not selection.is_complete:
        number = next(numbers)
        selection.put(group([1, 0] if has_signal[number] else [0, 0], name=str(number)))
    filtered = [int(each.prompt_id) for groups in selection.filtered().values() for each in groups]
    return [int(each.prompt_id) for each in selection.chosen()], filtered


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("max_refills", [0, 2])
def test_a_batch_is_bounded_and_whole(max_refills, share, updates):
    chance, config = random.Random(5), config_of(updates=updates, max_refills=max_refills)
    for _ in range(50):
        has_signal = [chance.random() < share for _ in range(4 * (1 + max_refills))]
        chosen, filtered = select(has_signal, config)
        sampled = len(chosen) + len(filtered)
        assert sorted(chosen + filtered) == list(range(sampled)) and chosen == sorted(chosen)
        wanted = [number for number in range(sampled) if has_signal[number]]
        assert set(wanted) <= set(chosen) and updates <= len(chosen) <= 4
        if len(wanted) >= updates:
            assert chosen == wanted
        if len(wanted) < 4:
            assert sampled == len(has_signal), "every refill was tried before a place stays empty"
        assert all(update_parts([group([1], name=str(n)) for n in chosen], config.algorithm))


# through the queue and the ledger


class Stream:
    """Prompts 0, 1, 2 ... as a task's stream gives them."""

    def __init__(self, position=0):
        self.position = position

    def __next__(self) -> Prompt:
        self.position += 1
        return self.by_id(f"train/{self.position - 1:07d}")

    def by_id(self, name: str) -> Prompt:
        return Prompt(name, "", "", {})


class Dispatcher:
    """Answers after a time drawn by ``seed``. What a group earns depends on its prompt and on the version alone."""

    def __init__(self, seed: int, admission: Admission, share: float):
        self.chance, self.admission, self.share = random.Random(seed), admission, share
        self.asked: list[str] = []
        self.faults = ConsecutiveFailures()

    async def run_group(self, prompt, sampling) -> Group:
        self.asked.append(prompt.id)
        version = self.admission.version
        await asyncio.sleep(self.chance.random() * 0.003)
        lucky = random.Random(f"{prompt.id} {version}").random() < self.share
        return group([1.0, 0.0, 0.0, 1.0] if lucky else [1.0] * 4, name=prompt.id)


def make_queue(ledger: Ledger, config: Config, *, seed=0, share=0.4, position=0) -> RolloutQueue:
    admission = Admission(config.rollout.prompts_per_step, config.rollout.max_staleness)
    admission.advance(0)
    dispatcher = Dispatcher(seed, admission, share)
    return RolloutQueue(
        *(config, Stream(position), ledger, dispatcher, admission, SimpleNamespace(pending=None)),
        max_tokens=64,
        on_score_failed=lambda *_: None,
    )


async def train(queue: RolloutQueue, first: int, last: int) -> list[list[str]]:
    """Steps through the account; each one's prompts."""
    batches = []
    for step in range(first, last + 1):
        batch = await queue.collect()
        queue.settle(batch.groups, [], step)
        queue.admission.advance(step)
        batches.append([each.prompt_id for each in batch.groups])
    queue.cancel()
    return batches


def run(path, config: Config, **settings) -> list[list[str]]:
    ledger = Ledger(path)
    try:
        return asyncio.run(train_all(ledger, config, **settings))
    finally:
        ledger.close()
        assert flaws(path) == []


async def train_all(ledger, config, steps=6, **settings):
    return await train(make_queue(ledger, config, **settings), 1, steps)


def test_a_batch_does_not_depend_on_who_is_faster(tmp_path):
    batches = [run(tmp_path / f"{seed}.db", config_of(), seed=seed) for seed in range(4)]
    assert batches[0] == batches[1] == batches[2] == batches[3]
    assert all(batch == sorted(batch) for batch in batches[0])


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_filtered_sample_is_discarded_by_name(tmp_path, staleness):
    config = config_of(staleness=staleness, max_refills=50)
    assert [len(batch) for batch in run(tmp_path / "ledger.db", config)] == [4] * 6
    ledger = Ledger(tmp_path / "ledger.db")
    account = ledger.account()
    assert account["trained"] == 6 * 4 * SAMPLES and account["discarded (no_signal)"] > 0
    assert account["issued"] == account["trained"] + account["pending"] + account["discarded (no_signal)"]
    assert account["pending"] <= staleness * 4 * SAMPLES
    ledger.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_task_that_is_solved_does_not_end_the_run(tmp_path, staleness):
    """No group says anything: each step samples its bound and takes back one group, which trains nothing."""
    config = config_of(staleness=staleness)
    assert [len(batch) for batch in run(tmp_path / "ledger.db", config, share=0.0, steps=9)] == [1] * 9
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.account()["discarded (no_signal)"] == 9 * (3 * 4 - 1) * SAMPLES
    ledger.close()


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [3, 9, 14, 25, 40])
def test_a_run_that_is_killed_while_it_samples_goes_on_to_the_same_batches(tmp_path, after):
    undisturbed = run(tmp_path / "whole.db", config_of())

    async def until_killed(ledger: Ledger) -> int:
        """Steps that were settled when the controller died, ``after`` groups having come back."""
        queue, left, step = make_queue(ledger, config_of(), seed=7), [after], 0
        next_group = queue._next_group

        async def killing():
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return await next_group()

        queue._next_group = killing
        try:
            for step in range(1, 7):
                batch = await queue.collect()
                queue.settle(batch.groups, [], step)
                queue.admission.advance(step)
        except Killed:
            step -= 1
        queue.cancel()
        return step

    path = tmp_path / "killed.db"
    ledger = Ledger(path)
    step = asyncio.run(until_killed(ledger))
    ledger.close()

    async def resume(ledger: Ledger):
        pending = ledger.rewind(step, SAMPLES)
        queue = make_queue(ledger, config_of(), seed=8, position=1 + int(ledger.last_issued().split("/")[1]))
        queue.restart(deque(queue.stream.by_id(name) for name in pending), step)
        queue.admission.advance(step)
        return await train(queue, step + 1, 6)

    ledger = Ledger(path)
    assert step < 6 and asyncio.run(resume(ledger)) == undisturbed[step:]
    ledger.close()
    assert flaws(path) == []


def test_a_nonfinite_batch_gives_all_its_places_back(tmp_path):
    """Also those that stayed empty."""

    async def lose_one():
        queue = make_queue(ledger, config_of(max_refills=0), share=0.4)
        batch = await queue.collect()
        assert len(batch.groups) < 4
        queue.settle([], batch.groups, 1)
        queue.give_back_batch()
        return await asyncio.wait_for(train(queue, 1, 3), 60)

    ledger = Ledger(tmp_path / "ledger.db")
    assert len(asyncio.run(lose_one())) == 3
    ledger.close()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"filter": {"min_pass_rate": 0.9, "max_pass_rate": 0.1}}, "no group would be left"),
        ({"filter": {"max_pass_rate": 1.5}}, "filter.max_pass_rate = 1.5"),
        ({"filter": {"no_signals": True}}, "did you mean 'no_signal'"),
        ({"algorithm": {"overlong_buffer": 17}}, "rollout.max_new_tokens = 16"),
    ],
)
def test_mistakes_are_one_line(overrides, said):
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_reasons_are_all_named():
    assert set(FILTER_REASONS) == {"no_signal", "too_easy", "too_hard", "all_truncated"}


# a run


@pytest.mark.slow
def test_a_run_that_filters_is_killed_resumed_and_replayed_to_the_same_bits(tmp_path):
    """Real actors, staleness 1, rewards shaped: the account adds up, and each step comes out as it did."""
    root = tmp_path / "run"
    settings = dict(
        filter__no_signal=True,
        filter__max_refills=3,
        rollout__max_staleness=1,
        algorithm__overlong_buffer=3,
        algorithm__updates_per_batch=2,
        training__steps=10,
        checkpoint__every=4,
    )
    process = running.start(root, **settings)
    running.wait_for_step(root, 6)
    process.kill()
    process.wait()
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, 11))
    assert any(record.get("sampled_per_trained", 0) > 1 for record in records)
    assert any(record.get("overlong_punishment", 0) < 0 for record in records)
    assert all(event["same"] for event in read_events(root) if event["kind"] == "redone")
    account = Ledger(root / "ledger.db").account()
    assert account["discarded (no_signal)"] > 0
    assert account["issued"] == account["trained"] + account["pending"] + account["discarded (no_signal)"]
    for step in range(1, 11):
        groups = read_rollouts(root / "rollouts", step)
        unequal = [len({each.reward for each in group.rollouts}) > 1 for group in groups]
        assert all(unequal) or len(groups) <= 2, "what says nothing is taken back for an optimizer step alone"
    assert cli.main(["ledger", str(root)]) == 0
    assert cli.main(["replay", str(root), "--from", "1", "--to", "10"]) == 0
