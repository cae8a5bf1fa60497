"""A prompt that kills its engine is discarded by name; its neighbours are not, and the run goes on."""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.loop.rollout_queue import RolloutQueue, sampled
from titan_rl.data.types import Group, Prompt, Request, RequestRefused, Rollout, Sampling
from titan_rl.mesh.control import dispatcher as dispatch
from titan_rl.mesh.control.dispatcher import Dispatcher
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures, EveryPromptFails, PoisonPrompts
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import Router
from titan_rl.mesh.processes.deadlines import DeadlineError, together
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.remote_call import RemoteCall, actor_of
from titan_rl.records.ledger.audit import flaws
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import sampling_metrics

SAMPLING = Sampling(2, 4, 1.0, 64)


class Process:
    """An actor process that only lives and dies."""

    def __init__(self, name: str, mesh: "Mesh"):
        self.name, self.why, self.mesh, self.wakes = name, "died", mesh, set()
        self.died = asyncio.get_running_loop().create_future()
        self.actor = len(mesh.started)
        """Its number: what other actors are told of it."""
        mesh.started.append(self)

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    def kill(self) -> None:
        if not self.died.done():
            self.died.set_result(0.0)
            for wake in list(self.wakes):
                wake()
            self.mesh.on_death(self)


class Mesh:
    """Engines and verifiers whose deaths are as real to the dispatcher as a process's; each is replaced at once."""

    def __init__(
        self,
        engines: int,
        verifiers: int = 1,
        *,
        kills=(),
        kills_verifier=(),
        refused=(),
        strikes=(),
        max_retries: int = 2,
    ):
        self.config = Config()
        self.config.rollout.max_retries = max_retries
        self.kills, self.kills_verifier, self.refused = set(kills), set(kills_verifier), set(refused)
        self.strikes = list(strikes)
        """Why engines die whatever they do, one after the other."""
        self.said, self.events, self.reissued, self.answered = [], [], [], []
        self.moves: dict[str, asyncio.Queue] = {}
        """Of each group under way, where it is to go on."""
        self.started: list[Process] = []
        self.deaths: Counter[str] = Counter()
        self.generators = SimpleNamespace(
            router=Router("generator", range(engines)),
            replicas={},
            log=self.said.append,
            fail=self.fail,
            processes=SimpleNamespace(record_event=lambda kind, **fields: self.events.append({"kind": kind, **fields})),
        )
        self.verifiers = SimpleNamespace(
            router=Router("verifier", range(verifiers)), procs={}, note_scoring=lambda name, seconds: None
        )
        for number in range(engines):
            self.generators.replicas[number] = Replica(number, [Process(f"generator {number}", self)])
        for number in range(verifiers):
            self.verifiers.procs[number] = Process(f"verifier {number}", self)
        self.dispatcher = Dispatcher(self.config, self.generators, self.verifiers, on_retry=self.reissued.append)

    def on_death(self, process: Process) -> None:
        self.deaths[process.name.split()[0]] += 1
        kind, number = process.name.split()[0], int(process.name.split()[1])
        owner = self.generators if kind == "generator" else self.verifiers
        owner.router.take_out(number, f"{process.name} {process.why}")
        members = owner.replicas if kind == "generator" else owner.procs
        del members[number]

        def replace() -> None:
            new = Process(process.name, self)
            members[number] = Replica(number, [new]) if kind == "generator" else new
            owner.router.put_in(number)

        asyncio.get_running_loop().call_later(0.002, replace)

    def fail(self, number: int, reason: str) -> None:
        replica = self.generators.replicas[number]
        replica.ranks[0].why = reason
        replica.kill()

    async def call(self, verifier: Process, request: RemoteCall[Group], *, seconds, what):
        """In the place of a verifier's endpoints."""
        if request.endpoint != "run_group":
            if verifier.is_dead:
                raise ActorDied([verifier], what)
            name, *reference = request.arguments
            self.moves[name].put_nowait(reference[0] if reference else b"")
            return None
        prompt, sampling, replica = request.arguments
        self.moves[prompt.id] = asyncio.Queue()
        while True:
            leader = self.started[actor_of(replica)]
            self.answered.append(prompt.id)
            await asyncio.sleep(0.001)
            if self.strikes and not leader.is_dead:
                leader.why = self.strikes.pop()
                leader.kill()
            if prompt.id in self.kills:
                leader.kill()
            if prompt.id in self.kills_verifier:
                verifier.kill()
            await asyncio.sleep(0.001)
            if verifier.is_dead:
                raise ActorDied([verifier], what)
            if not leader.is_dead:
                break
            while (replica := await self.moves[prompt.id].get()) is None:
                pass
            if not replica:
                raise AssertionError("nobody waits for it")
        if prompt.id in self.refused:
            failure = "ValueError: token 99 is out of vocabulary"
            return Group(prompt.id, [], refused="infra_error", replica_failure=failure, is_request_refused=True)
        return Group(prompt.id, [rollout(prompt.id, sample) for sample in range(sampling.num_samples)])


def rollout(name: str, sample: int) -> Rollout:
    return Rollout(name, sample, np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1), [], "ok", reward=float(sample))


def prompt(name: str, place: str = "") -> Prompt:
    return Prompt(name, "", "", {"place": place})


def sample_all(monkeypatch, names, **settings) -> tuple[Mesh, dict[str, str]]:
    """All prompts at once; each one's refusal, or "" for a group."""

    async def run():
        mesh = Mesh(**settings)
        monkeypatch.setattr(dispatch, "call", mesh.call)
        groups = await asyncio.gather(*(mesh.dispatcher.run_group(prompt(name), SAMPLING) for name in names))
        return mesh, {group.prompt_id: group.refused for group in groups}

    return asyncio.run(asyncio.wait_for(run(), 20))


NAMES = [f"p{number}" for number in range(12)]


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("max_retries", [0, 1, 2, 5, 20])
def test_who_kills_engines_is_refused_and_nobody_else(monkeypatch, engines, max_retries):
    mesh, refused = sample_all(monkeypatch, NAMES, engines=engines, kills={"p5"}, max_retries=max_retries)
    assert refused == {name: "poison" if name == "p5" else "" for name in NAMES}
    # a death among others proves nothing, so there is one alone, whatever the setting
    assert mesh.deaths == {"generator": max(max_retries, 2)}
    [event] = mesh.events
    assert event["kind"] == "poison" and event["prompt"] == "p5" and "generator" in event["why"]
    assert any("p5 is discarded as poison" in line for line in mesh.said)
    assert mesh.reissued.count("p5") == max(max_retries, 2) - 1


def test_several_poisons_do_not_use_up_the_replacements(monkeypatch):
    """More deaths than faults in a row are allowed, and one engine only."""
    poison = {"p3", "p8"}  # three in a row would be the run's fault
    mesh, refused = sample_all(monkeypatch, NAMES, engines=1, kills=poison, max_retries=8)
    assert {name for name, why in refused.items() if why} == poison
    assert mesh.deaths["generator"] > 12


def fails_for_every_prompt(monkeypatch, **settings) -> tuple[Mesh, str]:
    """What a hundred prompts end with that are sampled side by side."""
    meshes, names = [], [f"p{number}" for number in range(100)]

    class Remembered(Mesh):
        def __init__(self, **settings):
            super().__init__(**settings)
            meshes.append(self)

    monkeypatch.setattr(sys.modules[__name__], "Mesh", Remembered)
    with pytest.raises(EveryPromptFails) as caught:
        sample_all(monkeypatch, names, **{name: names if value == "all" else value for name, value in settings.items()})
    return meshes[0], str(caught.value)


def test_an_engine_that_nothing_survives_ends_the_run_by_name(monkeypatch):
    mesh, said = fails_for_every_prompt(monkeypatch, engines=1, kills="all")
    assert re.fullmatch(r"3 prompts in a row \((p\d+(, )?){3}\) failed for the same reason: generator died", said)
    assert mesh.deaths["generator"] == 4, "one with all there, and one with each alone"


def test_a_verifier_that_nothing_survives_ends_the_run_by_name(monkeypatch):
    _, said = fails_for_every_prompt(monkeypatch, engines=1, kills_verifier="all")
    assert said.endswith("failed for the same reason: verifier died")


def test_who_is_asked_after_the_end_is_told_of_it(monkeypatch):
    mesh, said = fails_for_every_prompt(monkeypatch, engines=1, kills="all")
    with pytest.raises(EveryPromptFails) as caught:
        asyncio.run(mesh.dispatcher.run_group(prompt("another"), SAMPLING))
    assert str(caught.value) == said


def test_three_in_a_row_for_one_reason_and_each_after_the_one_before():
    faults, now = ConsecutiveFailures(), time.monotonic
    for number in range(9):  # under way together: what they all need may have been away for a moment
        faults.record_failure(f"train/{number}", "no route to host", began=0.0)
    assert faults.patience == 4
    faults.record_failure("train/9", "no route to host", now())
    for _ in range(3):
        faults.record_failure("train/9", "no route to host", now())  # one prompt, however often
    faults.record_failure("train/10", "KeyError: 'answer'", now())  # another reason
    for number in range(11, 20):
        faults.record_failure(f"train/{number}", "KeyError: 'answer'", now())
        faults.record_success()
    faults.record_failure("train/20", "train/20 has an odd <object at 0x7f00aa00bb>", now())
    faults.record_failure("train/21", "train/21 has an odd <object at 0x7f00aa00cc>", now())
    with pytest.raises(EveryPromptFails) as caught:
        faults.record_failure("train/22", "train/22 has an odd <object at 0x7f00aa00dd>", now())
    assert str(caught.value) == (
        "3 prompts in a row (train/20, train/21, train/22) failed for the same reason: "
        "a prompt has an odd <object at 0x...>"
    )


def test_what_engines_died_of_before_is_told_with_what_they_die_of_last(monkeypatch):
    """As of one that stood still after another had said what it could not do."""

    async def run() -> Group:
        mesh = Mesh(1, strikes=["failed: its answer did not end", "failed: temperature must be in [0, 2]"])
        monkeypatch.setattr(dispatch, "call", mesh.call)
        return await mesh.dispatcher.run_group(prompt("p0"), SAMPLING)

    group = asyncio.run(run())
    assert group.refused == "poison"
    told = ["generator failed: temperature must be in [0, 2]", "generator failed: its answer did not end"]
    assert group.replica_failure.split("; ") == told


def test_a_silence_is_told_long_before_it_ends(monkeypatch):
    """Once, however many wait."""

    async def run():
        mesh = Mesh(1)
        mesh.config.verifier.episode_timeout = 0.05

        async def call(verifier, request, *, seconds, what):
            await asyncio.sleep(0.03)
            return await mesh.call(verifier, request, seconds=seconds, what=what)

        monkeypatch.setattr(dispatch, "call", call)
        await asyncio.gather(*(mesh.dispatcher.run_group(prompt(name), SAMPLING) for name in NAMES))
        return mesh

    mesh = asyncio.run(run())
    [line] = mesh.said
    assert line.startswith("no group has ended for 0.01 s") and "verifier.episode_timeout = 0.05 s" in line


# what is given up after its retries: an environment, a reward, a judge


def test_a_reward_that_always_fails_ends_the_run_by_name(monkeypatch):
    """After its retries, of three prompts one after the other; and one that answers between them is enough."""
    pauses, wait = [], asyncio.sleep

    async def no_wait(seconds: float) -> None:
        pauses.append(seconds)
        await wait(0)

    monkeypatch.setattr("titan_rl.controller.loop.rollout_queue.asyncio.sleep", no_wait)

    async def run(good: set[str], count: int) -> list[Group]:
        faults = ConsecutiveFailures()

        async def run_group(prompt, sampling):
            made = [rollout(prompt.id, sample) for sample in range(sampling.num_samples)]
            for each in made:
                if prompt.id not in good:
                    each.status, each.failure = "infra_error", "mine:reward: KeyError: 'x'"
            if prompt.id in good:
                faults.record_success()
            return Group(prompt.id, made)

        return [await sampled(run_group, prompt(name), SAMPLING, 2, faults) for name in NAMES[:count]]

    with pytest.raises(
        EveryPromptFails, match=r"\(p0, p1, p2\) failed for the same reason: mine:reward: KeyError: 'x'"
    ):
        asyncio.run(run(set(), 12))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "half a minute, in which a server may come back"
    groups = asyncio.run(run({"p2", "p5", "p8", "p11"}, 12))
    assert len(groups) == 12


def test_a_prompt_that_is_sampled_again_for_a_score_is_told_and_counted(monkeypatch, tmp_path):
    monkeypatch.setattr("titan_rl.controller.loop.rollout_queue._PAUSE_SECONDS", 0.0)
    attempts, retried, failed = Counter(), [], []

    class Flaky:
        faults = ConsecutiveFailures()

        async def run_group(self, prompt, sampling):
            """The second prompt's first two attempts lose a sample; the third's last attempt does, too."""
            made = [rollout(prompt.id, sample) for sample in range(sampling.num_samples)]
            number = attempts[prompt.id] = attempts[prompt.id] + 1
            if number <= {"p1": 2, "p2": 3}.get(prompt.id, 0):
                made[1].status, made[1].failure = "infra_error", "mine:reward: it rained"
            return Group(prompt.id, made)

    async def run() -> list[Group]:
        config, admission = Config(), Admission(3, 0)
        config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_retries = 3, 3, 2
        admission.advance(0)
        queue = RolloutQueue(
            *(config, (prompt(f"p{number}", f"mine.jsonl line {number}") for number in count()), ledger, Flaky()),
            *(admission, SimpleNamespace(pending=None)),
            max_tokens=64,
            on_score_failed=lambda group, *what: failed.append((group.place, *what)),
            on_score_retried=lambda group, *what: retried.append((group.place, *what)),
        )
        return (await queue.collect()).sampled

    ledger = Ledger(tmp_path / "ledger.db")
    groups = asyncio.run(asyncio.wait_for(run(), 20))
    why = "mine:reward: it rained"
    places = [f"mine.jsonl line {number}" for number in (1, 1, 2, 2)]
    assert sorted(retried) == [(place, 1, why) for place in places] and failed == [(places[-1], 1, why)]
    counted = {group.prompt_id: group.score_retries for group in groups}
    assert counted == {"p0": 0, "p1": 2, "p2": 2}
    assert sampling_metrics(groups, 1)["score_retries"] == 4
    assert "score_retries" not in sampling_metrics(groups[:1], 1)


def test_a_reward_that_is_always_too_slow_ends_the_run_by_name():
    """Nothing is sampled again for it; one answer that is in time is enough to go on."""

    async def run(status_of: Callable[[int, int], str]) -> int:
        faults, asked = ConsecutiveFailures(), []

        async def run_group(prompt, sampling):
            made = [rollout(prompt.id, sample) for sample in range(sampling.num_samples)]
            for each in made:
                each.status, each.failure = status_of(len(asked), each.sample), "scoring took longer than 5.0 s"
            asked.append(prompt.id)
            return Group(prompt.id, made)

        groups = [await sampled(run_group, prompt(name), SAMPLING, 2, faults) for name in NAMES[:9]]
        return len(groups)

    said = (
        r"3 prompts in a row \(p0, p1, p2\) failed for the same reason: scoring took longer than 5.0 s: "
        r"no answer was in time"
    )
    with pytest.raises(EveryPromptFails, match=f"{said}; .*raise verifier.score_timeout"):
        asyncio.run(run(lambda number, sample: "timeout"))
    assert asyncio.run(run(lambda number, sample: "timeout" if sample else "ok")) == 9


@pytest.mark.parametrize(
    ("status", "goes_on"), [("timeout", False), ("infra_error", False), ("truncated", True), ("max_turns", True)]
)
def test_an_answer_in_time_is_what_tells_that_not_all_prompts_fail(monkeypatch, status, goes_on):
    async def run() -> None:
        mesh = Mesh(1)

        async def call(verifier, request, *, seconds, what):
            group = await mesh.call(verifier, request, seconds=seconds, what=what)
            for each in group.rollouts:
                each.status = status
            return group

        monkeypatch.setattr(dispatch, "call", call)
        for number in range(3):
            await mesh.dispatcher.run_group(prompt(f"p{number}"), SAMPLING)
            mesh.dispatcher.faults.record_failure(f"p{number}", "too slow", time.monotonic())

    if goes_on:
        asyncio.run(run())
    else:
        with pytest.raises(EveryPromptFails, match="too slow"):
            asyncio.run(run())


def test_no_generator_for_three_prompts_ends_the_run(monkeypatch):
    async def run():
        faults = ConsecutiveFailures()

        async def run_group(prompt, sampling):
            raise DeadlineError("no generator came back within 300 s: generator 0: raised OSError")

        asked = (sampled(run_group, prompt(name), SAMPLING, 2, faults) for name in NAMES)
        await together(asked)

    with pytest.raises(EveryPromptFails, match="no generator came back within 300 s: generator 0: raised OSError"):
        asyncio.run(run())


def test_a_batch_is_given_up_whatever_its_first_group_waits_for(monkeypatch, tmp_path):
    monkeypatch.setattr("titan_rl.controller.loop.rollout_queue._LOOK_SECONDS", 0.01)

    class Stuck:
        faults = ConsecutiveFailures()

        async def run_group(self, prompt, sampling):
            await asyncio.sleep(60 if prompt.id.endswith("0") else 0)
            self.faults.record_failure(prompt.id, "no memory", time.monotonic())
            return Group(prompt.id, [], refused="poison")

    async def run():
        config, admission = Config(), Admission(16, 0)
        admission.advance(0)
        queue = RolloutQueue(
            *(config, (prompt(f"train/{number}") for number in count()), Ledger(tmp_path / "ledger.db"), Stuck()),
            *(admission, SimpleNamespace(pending=None)),
            max_tokens=64,
            on_score_failed=print,
        )
        await queue.collect()

    with pytest.raises(EveryPromptFails, match="no memory"):
        asyncio.run(asyncio.wait_for(run(), 20))


def test_who_kills_verifiers_is_refused_and_nobody_else(monkeypatch):
    mesh, refused = sample_all(monkeypatch, NAMES, engines=2, verifiers=2, kills_verifier={"p7"})
    assert refused == {name: "poison" if name == "p7" else "" for name in NAMES}
    assert mesh.deaths == {"verifier": 2}


def test_a_refused_request_kills_nobody(monkeypatch):
    """Not even where many are refused before any group is done."""
    refused_ones = {f"p{number}" for number in range(1, 12)}
    many = [f"q{number}" for number in range(10)]
    mesh, refused = sample_all(monkeypatch, NAMES + many, engines=1, refused=refused_ones | set(many))
    assert {name for name, why in refused.items() if why == "poison"} == refused_ones | set(many)
    assert not refused["p0"] and not mesh.deaths
    assert mesh.events and all("out of vocabulary" in event["why"] for event in mesh.events)


@pytest.mark.parametrize("strikes", [["died"], ["lost host 1"] * 9])
def test_deaths_from_outside_cost_no_prompt(monkeypatch, strikes):
    """One death has witnesses but no culprit, and of the loss of a host nobody can be one, however often it happens."""
    mesh, refused = sample_all(monkeypatch, NAMES, engines=2, strikes=strikes)
    assert mesh.deaths["generator"] == len(strikes) and not any(refused.values()) and not mesh.events


def test_alone_means_alone():
    """While such a group waits or works, no other is given that engine; the others' wait ends with it."""

    async def run():
        router, together = Router("generator", range(2)), Counter()

        async def work(alone: bool) -> None:
            async with router.choose(1, alone=alone) as number:
                together[number] += 1
                assert not (alone and together[number] > 1)
                lonely.update({number} if alone else ())
                assert alone or number not in lonely
                await asyncio.sleep(0.002)
                lonely.difference_update({number} if alone else ())
                together[number] -= 1

        lonely: set[int] = set()
        await asyncio.wait_for(asyncio.gather(*(work(index % 3 == 0) for index in range(30))), 10)
        assert not router._reserved and not router._alone

    asyncio.run(run())


def test_who_waits_to_be_alone_and_is_cancelled_keeps_nothing():
    async def run():
        router = Router("generator", range(1))

        async def alone() -> None:
            async with router.choose(1, alone=True):
                raise AssertionError("it is not idle")

        async with router.choose(1):
            waiting = asyncio.create_task(alone())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait({waiting})
            async with router.choose(1) as number:
                assert number == 0

    asyncio.run(run())


def test_a_suspect_is_cleared_by_an_answer():
    suspects = PoisonPrompts(2)
    suspects.count_death("a", alone=False)
    assert suspects.is_suspect("a") and not suspects.is_poison("a")
    suspects.count_death("a", alone=False)
    assert not suspects.is_poison("a"), "others were there each time"
    suspects.count_death("a", alone=True)
    assert suspects.is_poison("a") and suspects.num_deaths("a") == 3
    suspects.forget("a")
    assert not suspects.is_suspect("a") and not suspects.is_poison("a")


@pytest.mark.parametrize("tokens", [[], [-1], [3, 64], [10**6]])
def test_tokens_that_a_model_does_not_have_are_refused(tokens):
    Request(np.asarray([0, 63], np.int32), [1], 4, 1.0).check(64)
    with pytest.raises(RequestRefused, match="vocabulary of 64"):
        Request(np.asarray(tokens, np.int32), [1], 4, 1.0).check(64)


def test_a_batch_is_full_without_the_poison_and_the_ledger_names_it(monkeypatch, tmp_path):
    async def run() -> list[Group]:
        mesh = Mesh(2, kills={"train/0000002"}, refused={"train/0000005"})
        mesh.config.rollout.prompts_per_step, mesh.config.rollout.group_size = 8, 2
        monkeypatch.setattr(dispatch, "call", mesh.call)
        stream = (prompt(f"train/{number:07d}") for number in count())
        weights = SimpleNamespace(pending=None)
        admission = Admission(8, 0)
        admission.advance(0)
        queue = RolloutQueue(
            *(mesh.config, stream, ledger, mesh.dispatcher, admission, weights), max_tokens=64, on_score_failed=print
        )
        groups = (await queue.collect()).groups
        queue.settle(groups, [], 1)
        assert {event["prompt"] for event in mesh.events} == {"train/0000002", "train/0000005"}
        return groups

    ledger = Ledger(tmp_path / "ledger.db")
    groups = asyncio.run(asyncio.wait_for(run(), 20))
    assert [group.prompt_id[-1] for group in groups] == list("01346789")
    assert ledger.account() == {"issued": 20, "trained": 16, "pending": 0, "discarded (poison)": 4}
    assert flaws(ledger.path) == []
