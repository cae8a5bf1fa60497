"""A call to several processes goes wrong: the one that is to blame is named, and only that one is ended."""

import asyncio
import inspect
import subprocess
import time
from types import SimpleNamespace

import pytest
from monarch._src.actor.endpoint import EndpointProperty

from titan_rl.actors.generator import Generator
from titan_rl.actors.role import Role
from titan_rl.actors.trainer import Trainer
from titan_rl.actors.verifier import Verifier
from titan_rl.mesh.channel.snapshots.copier import SnapshotCopier
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, RoleEndpoints, TrainerEndpoints, VerifierEndpoints
from titan_rl.mesh.processes.blame import Ending, Outcome, to_blame
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.calls import Deadline, call_all, call_each, started
from titan_rl.mesh.supervision.remote_call import RemoteCall, SidecarEndpoints, stub
from titan_rl.mesh.supervision.sidecar import Sidecar

ASK = RemoteCall("ask")
ANSWERED, DIED = Outcome(Ending.ANSWERED, 7), Outcome(Ending.DIED)
HUNG, STOPPED = Outcome(Ending.HUNG), Outcome(Ending.HUNG, is_stopped=True)


def raised(order: int) -> Outcome:
    return Outcome(Ending.RAISED, ValueError(order), order)


@pytest.mark.parametrize(
    ("outcomes", "blamed"),
    [
        pytest.param([ANSWERED, ANSWERED], [], id="all answered"),
        pytest.param([ANSWERED, None], [], id="one has time left"),
        pytest.param([raised(0), DIED, raised(1)], [1], id="a death explains what others raise"),
        pytest.param([DIED, ANSWERED, DIED], [0, 2], id="all the dead"),
        pytest.param([raised(1), None, raised(0)], [2], id="the first to raise"),
        pytest.param([ANSWERED, HUNG, HUNG], [1, 2], id="all that hang"),
        pytest.param([HUNG, STOPPED, HUNG], [1], id="others wait for the one that is stopped"),
        pytest.param([HUNG, raised(0)], [0], id="a hang explains what others raise"),
        pytest.param([HUNG, DIED, STOPPED], [1, 2], id="dead and stopped"),
    ],
)
def test_blame(outcomes, blamed):
    assert to_blame(outcomes, one_fails_all=True) == blamed


def test_raising_is_an_answer_where_peers_do_not_wait_for_it():
    assert to_blame([raised(0), ANSWERED, None], one_fails_all=False) == []
    assert to_blame([raised(0), DIED], one_fails_all=False) == [1]


class FakeProcess:
    """An actor process without Monarch: its one endpoint awaits ``work``; killed, it is dead at once."""

    def __init__(self, name: str, work, pid: int = 0):
        self.name, self.pid, self.why, self.wakes = name, pid, "died", set()
        self.host = Host("controller", None)
        self.died = asyncio.get_running_loop().create_future()
        self.actor = SimpleNamespace(ask=SimpleNamespace(call_one=work))

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    @property
    def is_stopped(self) -> bool:
        return self.host.processes.is_stopped(self.pid)

    def end(self) -> None:
        if not self.is_dead:
            self.died.set_result(time.monotonic())
            for wake in list(self.wakes):
                wake()

    def fail(self, error: BaseException) -> None:
        self.why = f"raised {error}"
        self.end()

    async def kill_hung(self, known_by: str) -> None:
        self.why, self.why_hung = "hung", known_by
        self.end()


async def seven():
    return 7


async def never():
    await asyncio.Event().wait()


def raise_after(seconds: float, text: str):
    async def work():
        await asyncio.sleep(seconds)
        raise ValueError(text)

    return work


def test_answers_come_in_order():
    async def run():
        async def slow():
            await asyncio.sleep(0.02)
            return 1

        assert await call_all([FakeProcess("a", slow), FakeProcess("b", seven)], ASK, seconds=5, what="x") == [1, 7]

    asyncio.run(run())


def test_what_an_actor_raises_comes_through_and_nobody_is_ended():
    async def run():
        processes = [FakeProcess("a", seven), FakeProcess("b", raise_after(0, "broken"))]
        with pytest.raises(ValueError, match="broken"):
            await call_all(processes, ASK, seconds=5, what="x")
        assert not any(process.is_dead for process in processes)

    asyncio.run(run())


def test_the_first_to_raise_is_ended_where_one_fails_all():
    async def run():
        processes = [FakeProcess("a", raise_after(0.1, "later")), FakeProcess("b", raise_after(0, "first"))]
        calls = [(process, ASK) for process in processes]
        with pytest.raises(ActorDied, match="^b raised first while training$") as info:
            await call_each(calls, seconds=5, what="training", one_fails_all=True)
        assert isinstance(info.value.__cause__, ValueError) and not processes[0].is_dead

    asyncio.run(run())


def test_a_death_that_is_known_a_moment_later_explains_what_others_raise():
    async def run():
        processes = [FakeProcess("a", raise_after(0, "connection closed")), FakeProcess("b", never)]
        asyncio.get_running_loop().call_later(0.1, processes[1].end)
        with pytest.raises(ActorDied, match="^b died while training$") as info:
            await call_each([(p, ASK) for p in processes], seconds=5, what="training", one_fails_all=True)
        assert info.value.processes == processes[1:] and info.value.__cause__ is None

    asyncio.run(run())


def test_all_that_hang_are_ended_at_the_deadline():
    async def run():
        processes = [FakeProcess("a", never), FakeProcess("b", seven), FakeProcess("c", never)]
        with pytest.raises(ActorDied, match="^a hung, c hung while saving$"):
            await call_all(processes, ASK, seconds=0.05, what="saving")

    asyncio.run(run())


def test_a_deadline_that_begins_anew_is_waited_for():
    async def run():
        allowed, slow = Deadline(0.3), asyncio.Event()

        async def answer():
            await slow.wait()
            return 7

        process = FakeProcess("a", answer)
        work = asyncio.ensure_future(call_all([process], ASK, seconds=allowed, what="saving"))
        for _ in range(3):
            await asyncio.sleep(0.15)
            allowed.restart()
        slow.set()
        assert await work == [7] and not process.is_dead

    asyncio.run(run())


def test_of_those_that_hang_only_the_stopped_one_is_ended():
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        subprocess.run(["kill", "-STOP", str(sleeper.pid)], check=True)

        async def run():
            stopped = FakeProcess("a", never, sleeper.pid)

            async def wait_for_peer():
                await stopped.died
                raise ConnectionError("the peer is gone")

            processes = [stopped, FakeProcess("b", wait_for_peer)]
            with pytest.raises(ActorDied, match="^a hung while training$"):
                await call_all(processes, ASK, seconds=0.2, what="training")
            assert stopped.why_hung == "no answer in 0.2 s"

        asyncio.run(run())
    finally:
        sleeper.kill()
        sleeper.wait()


def test_an_answer_of_one_that_counts_as_dead_is_nobody_s():
    """Such as of a process that is there all the same, on a host that was lost and can be reached again."""

    async def run():
        answered = asyncio.Event()

        async def late():
            await asyncio.sleep(0.05)
            answered.set()
            return "stale"

        process = FakeProcess("verifier 0", late)
        calling = asyncio.ensure_future(call_all([process], ASK, seconds=5, what="scoring"))
        await asyncio.sleep(0.01)
        process.end()
        with pytest.raises(ActorDied, match="^verifier 0 died while scoring$"):
            await calling
        with pytest.raises(ActorDied):
            await call_all([process], ASK, seconds=5, what="scoring")
        assert not answered.is_set(), "nor is it waited for"

    asyncio.run(run())


STUBS = [
    (TrainerEndpoints, Trainer),
    (GeneratorEndpoints, Generator),
    (VerifierEndpoints, Verifier),
    (RoleEndpoints, Role),
    (SidecarEndpoints, Sidecar),
]


def signatures(stubs: type) -> dict[str, inspect.Signature]:
    found = {name: inspect.signature(one.method) for name, one in inspect.getmembers(stubs) if isinstance(one, stub)}
    return {name: as_it_arrives(signature) for name, signature in found.items()}


def as_it_arrives(signature: inspect.Signature) -> inspect.Signature:
    """A ``HostPath`` is a plain string there."""
    parameters = signature.parameters.values()
    as_text = [each.replace(annotation=str) if each.annotation is HostPath else each for each in parameters]
    return signature.replace(parameters=as_text)


def endpoints(actor: type) -> dict[str, inspect.Signature]:
    """Of their methods, which Monarch wraps where they are concurrent."""
    members = inspect.getmembers_static(actor, lambda member: isinstance(member, EndpointProperty))
    return {name: inspect.signature(inspect.unwrap(one._method)) for name, one in members}


@pytest.mark.parametrize(("stubs", "actor"), STUBS)
def test_stubs_and_endpoints_agree(stubs, actor):
    """By names, parameters with their types and defaults, and answers; both ways."""
    assert signatures(stubs) == endpoints(actor)
    assert inspect.Signature.empty not in [one.return_annotation for one in signatures(stubs).values()]


def test_a_copier_is_asked_as_a_sidecar_is():
    asked = endpoints(SnapshotCopier)
    assert {name: list(one.parameters) for name, one in asked.items()} == {
        name: list(signatures(SidecarEndpoints)[name].parameters) for name in ("keep", "kept")
    }


@pytest.mark.parametrize(
    ("deaths", "cause", "num_starts", "is_up"),
    [(0, None, 1, True), (1, None, 2, True), (2, None, 2, False), (1, ValueError("no model"), 1, False)],
    ids=["nobody dies", "one dies", "the next dies, too", "it raised, as it would again"],
)
def test_a_start_in_which_an_actor_dies_begins_once_again(deaths, cause, num_starts, is_up):
    starts, said = [], []

    async def start() -> str:
        starts.append(len(starts))
        if len(starts) <= deaths:
            raise ActorDied([SimpleNamespace(name="generator 0", why="died")], "starting generator 0") from cause
        return "up"

    async def run() -> str:
        return await started(start, said.append)

    if is_up:
        assert asyncio.run(run()) == "up"
    else:
        with pytest.raises(ActorDied):
            asyncio.run(run())
    assert len(starts) == num_starts and len(said) == num_starts - 1
