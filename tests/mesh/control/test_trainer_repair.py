"""A trainer rank dies: it is replaced, what depends on it follows, and the call is made again. Ranks are fakes."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from waiting import eventually

from titan_rl.mesh.control.colocation import NoColocation
from titan_rl.mesh.control.trainer_repair import ActorFault, TrainerMesh
from titan_rl.mesh.control.trainer_snapshots import RestorableSteps
from titan_rl.mesh.control.weight_sync import WeightSync
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.telemetry.stragglers import Stragglers
from titan_rl.mesh.weights.channel_link import WeightLink


class FakeRank:
    def __init__(self, name: str):
        self.name, self.why = name, "died"
        self.died = asyncio.get_running_loop().create_future()

    @property
    def is_dead(self) -> bool:
        return self.died.done()


class FakeTrainers:
    """One rank dies in each of the calls at these places."""

    def __init__(self, log: list, dies_at: set[int]):
        self.log, self.dies_at, self.num_calls = log, dies_at, 0
        self.ranks = [FakeRank("trainer rank 0"), FakeRank("trainer rank 1")]

    @property
    def dead(self) -> dict[int, FakeRank]:
        return {number: rank for number, rank in enumerate(self.ranks) if rank.is_dead}

    @property
    def is_complete(self) -> bool:
        return not self.dead

    async def train(self, batches: list, step: int) -> list:
        self.num_calls += 1
        self.log.append(f"train {step}")
        if self.num_calls in self.dies_at:
            self.ranks[1].died.set_result(time.monotonic())
            raise ActorDied([self.ranks[1]], f"training step {step}")
        return ["metrics"]

    async def replace(self, dead: dict) -> None:
        self.log.append("replace")
        for number, rank in dead.items():
            self.ranks[number] = FakeRank(rank.name)

    async def join(self) -> None:
        self.log.append("join")


class FakeSnapshots:
    def __init__(self, log: list, steps: list[int]):
        self.log, self.steps = log, steps

    async def find(self) -> RestorableSteps:
        self.log.append("find")
        return RestorableSteps([self.steps], {1: (self.steps, None)})

    async def restore(self, found: RestorableSteps, step: int) -> None:
        self.log.append(f"restore {step}")

    async def reopen(self) -> None:
        self.log.append("snapshots reopen")

    async def resume(self, step: int) -> None:
        self.log.append(f"snapshot of {step}")


class FakeLink:
    def __init__(self, log: list):
        self.log = log

    async def reopen(self) -> None:
        self.log.append("link reopen")

    async def resume(self, step: int) -> None:
        self.log.append("publish again")


class FakeStandby:
    def __init__(self, log: list):
        self.log = log

    def make(self) -> None:
        self.log.append("standby")


def make(dies_at: set[int], steps: list[int], is_protected: bool = True) -> tuple[TrainerMesh, list, list]:
    """The mesh, what happens in order, and the events."""
    log, events = [], []
    trainers, snapshots = FakeTrainers(log, dies_at), FakeSnapshots(log, steps)

    async def catch_up(given: FakeTrainers, step: int | None) -> int:
        assert given is trainers
        log.append(f"catch up from {step}")
        return 3

    mesh = TrainerMesh(
        trainers,
        snapshots if is_protected else None,
        [snapshots, FakeLink(log)],
        [FakeStandby(log)],
        colocation=NoColocation(),
        catch_up=catch_up,
        log=lambda text: None,
        record_event=lambda kind, **fields: events.append((kind, fields)),
    )
    return mesh, log, events


def test_a_dead_rank_is_replaced_and_the_step_begun_again():
    async def run():
        mesh, log, events = make({1}, steps=[5, 6])
        await mesh.begin_at(5)  # what is newer was never done
        log.clear()
        assert await mesh.train([], 6) == ["metrics"]
        repair = ["find", "replace", "join", "restore 5", "snapshots reopen", "link reopen", "catch up from 5"]
        assert log == ["train 6", *repair, "snapshot of 5", "publish again", "train 6", "standby"]
        [(kind, fields)] = events
        assert kind == "trainer_repaired" and (fields["who"], fields["step"], fields["steps_redone"]) == (
            "trainer rank 1",
            5,
            3,
        )

    asyncio.run(run())


def test_it_waits_after_each_call_also_with_gradients_that_are_yet_to_be_applied():
    """A loop of one's own may wait for samples between backward and update, and a helper may have them."""

    async def run():
        mesh, log, _ = make(set(), steps=[])
        mesh.colocation.release = lambda: log.append("waits")

        async def forward_backward(batch) -> str:
            return "metrics"

        async def optim_step(has_signal: bool, step: int) -> str:
            return f"step {step}"

        mesh.trainers.forward_backward, mesh.trainers.optim_step = forward_backward, optim_step
        await mesh.train([], 1)
        assert log == ["train 1", "waits", "standby"]
        await mesh.forward_backward(SimpleNamespace(has_signal=True))
        assert log.count("waits") == 2
        assert await mesh.optim_step(2) == "step 2"
        assert log.count("waits") == 3

    asyncio.run(run())


def test_who_stops_waiting_leaves_the_call_whole():
    """As a stop in the middle of an evaluation: cut off, the rank would have left its process group, and the next call,
    which saves the run, would fail of that."""

    async def run():
        mesh, log, _ = make(set(), steps=[])
        going_on, waits = asyncio.Event(), asyncio.Event()

        async def evaluate() -> str:
            log.append("evaluating")
            waits.set()
            try:
                await going_on.wait()
            finally:
                log.append("evaluated" if going_on.is_set() else "cut off")
            return "loss"

        async def called(name: str) -> str:
            log.append(name)
            return name

        evaluating = asyncio.create_task(mesh.ask(evaluate))
        await waits.wait()
        never = asyncio.create_task(mesh.ask(lambda: called("never begun")))
        await asyncio.sleep(0)
        evaluating.cancel()
        never.cancel()
        await asyncio.wait({evaluating, never})
        assert evaluating.cancelled() and never.cancelled()
        saving = asyncio.create_task(mesh.ask(lambda: called("save")))
        await asyncio.sleep(0.01)
        assert log == ["evaluating"]
        going_on.set()
        assert await saving == "save" and log == ["evaluating", "evaluated", "save"]
        waits.clear()
        going_on.clear()
        evaluating = asyncio.create_task(mesh.ask(evaluate))
        await waits.wait()
        mesh.stop()
        await asyncio.wait({evaluating})
        assert log[-1] == "cut off", "when the run ends nothing is left behind"

    asyncio.run(run())


def test_why_the_trainer_was_repaired_again_and_again_is_told():
    async def run():
        mesh, _, _ = make(set(range(1, 99)), steps=[0])
        with pytest.raises(ActorFault, match="repaired 5 times .*; at last trainer rank 1 died while the run went on"):
            await mesh.train([], 1)

    asyncio.run(run())


def test_without_a_common_step_it_catches_up_from_the_weights_of_the_file():
    async def run():
        mesh, log, _ = make({1}, steps=[])
        await mesh.train([], 1)
        assert "catch up from None" in log and not any(line.startswith("restore") for line in log)

    asyncio.run(run())


def test_too_many_repairs_without_a_step_end_the_run():
    async def run():
        mesh, log, _ = make(set(range(1, 100)), steps=[0])
        with pytest.raises(ActorFault, match="repaired 5 times without a step in between"):
            await mesh.train([], 1)
        assert log.count("replace") == 5

    asyncio.run(run())


def test_a_step_in_between_starts_the_count_again():
    async def run():
        mesh, log, _ = make({1, 2, 3, 4, 6, 7, 8, 9}, steps=[0, 1])
        await mesh.train([], 1)
        await mesh.train([], 2)
        assert log.count("replace") == 8

    asyncio.run(run())


def test_a_repair_that_fails_begins_again_before_any_rank_computes():
    """As where the keeper of a dead rank's snapshots dies, too: whoever has joined has the weights of the file."""

    async def run():
        mesh, log, events = make({1}, steps=[0])
        failures = 2

        async def restore(found: RestorableSteps, step: int) -> None:
            nonlocal failures
            failures -= 1
            log.append("restore")
            if failures >= 0:
                raise OSError("the keeper has gone")

        mesh.snapshots.restore = restore
        assert await mesh.train([], 1) == ["metrics"]
        calls = [line for line in log if line in ("train 1", "join", "restore", "link reopen")]
        assert calls == ["train 1", *2 * ["join", "restore"], "join", "restore", "link reopen", "train 1"]
        assert [fields["who"] for kind, fields in events if kind == "trainer_repaired"] == ["trainer rank 1"]

    asyncio.run(run())


def test_a_repair_that_never_succeeds_is_told_and_no_rank_computes():
    async def run():
        mesh, log, _ = make({1}, steps=[0])

        async def restore(found: RestorableSteps, step: int) -> None:
            raise OSError("the checkpoint cannot be read")

        mesh.snapshots.restore = restore
        with pytest.raises(OSError, match="cannot be read"):
            await mesh.train([], 1)
        with pytest.raises(ActorFault, match="repaired 5 times without a step in between"):
            await mesh.train([], 2)
        assert log.count("join") == 5 and [line for line in log if line.startswith("train")] == ["train 1"]

    asyncio.run(run())


def test_without_snapshots_a_death_ends_the_run_by_name():
    async def run():
        mesh, log, _ = make({1}, steps=[0], is_protected=False)
        with pytest.raises(ActorFault, match="trainer rank 1 died while the run went on: recovery is off"):
            await mesh.train([], 1)
        assert "replace" not in log

    asyncio.run(run())


def test_a_death_that_no_call_meets_is_repaired_too():
    async def run():
        mesh, log, _ = make(set(), steps=[0])
        watching = asyncio.ensure_future(mesh.watch())
        await asyncio.sleep(0)
        mesh.trainers.ranks[0].died.set_result(time.monotonic())
        await eventually(lambda: "publish again" in log, "the repair's last entry, 'publish again'")
        watching.cancel()
        assert log.count("replace") == 1

    asyncio.run(run())


def test_an_actor_that_raises_the_same_again_and_again_ends_the_run():
    async def run():
        mesh, _, _ = make(set(), steps=[0])

        async def raises():
            rank = mesh.trainers.ranks[1]
            rank.why = "raised a mistake"
            rank.died.set_result(time.monotonic())
            raise ActorDied([rank], "training step 1") from ValueError("a mistake")

        with pytest.raises(ActorFault, match="trainer rank 1 raised a mistake") as info:
            await mesh.ask(raises)
        assert isinstance(info.value.__cause__, ValueError)

    asyncio.run(run())


class FakeVerifiers:
    def take_scoring_seconds(self) -> dict:
        return {}


class StuckLink(WeightLink):
    """What is staged reaches nobody, and the first announcement waits for ever; notes the versions."""

    def __init__(self, trainers: FakeTrainers):
        super().__init__(trainers, "auto", seconds=1.0)
        self.delivered = []

    async def stage(self, version: int) -> None:
        self.published = version

    async def announce(self, version: int, healthy, failed) -> list:
        self.delivered.append(version)
        if len(self.delivered) == 1:
            await asyncio.Event().wait()
        return []


def test_after_a_repair_weights_bear_the_number_of_the_step_that_they_are_of():
    """A rank dies after step 6 while version 5 is on its way: version 5 is gone, and 6 must not be called 5."""

    async def run():
        mesh, _, _ = make(set(), steps=[5, 6])
        link = StuckLink(mesh.trainers)
        mesh.followers = [mesh.snapshots, link]
        weights = WeightSync(mesh, link, SimpleNamespace(healthy=[]), FakeVerifiers(), Stragglers())
        await mesh.begin_at(5)
        await weights.stage(5)
        delivery = asyncio.ensure_future(weights.announce(5))
        await mesh.train([], 6)
        mesh.trainers.ranks[1].died.set_result(time.monotonic())
        await delivery
        assert link.published == 6 and link.delivered == [5, 6]

    asyncio.run(run())


class FakeColocation(NoColocation):
    """Trainer and generators share devices; the generators have them."""

    is_with_trainer = False

    async def take(self, *, dead: bool = False) -> None:
        self.is_with_trainer = True

    async def give(self) -> None:
        self.is_with_trainer = False


class NotingLink(StuckLink):
    """A version is live at once."""

    async def announce(self, version: int, healthy, failed) -> list:
        self.delivered.append(version)
        return []


def test_generators_wake_again_whose_turn_only_a_repair_has_taken():
    """Nobody announces a version to them otherwise; a call that computes keeps the turn until one goes out."""

    async def run():
        mesh, _, _ = make(set(), steps=[5])
        mesh.colocation = colocation = FakeColocation()
        link = NotingLink(mesh.trainers)
        weights = WeightSync(mesh, link, SimpleNamespace(healthy=[]), FakeVerifiers(), Stragglers())
        await mesh.begin_at(5)
        await colocation.give()
        link.published = 5
        watching = asyncio.ensure_future(weights.watch())
        mesh.trainers.ranks[1].died.set_result(time.monotonic())
        await mesh.wait_until_complete()
        await eventually(lambda: link.delivered == [5], "the generators' turn")
        assert not colocation.is_with_trainer
        mesh.trainers.ranks[1].died.set_result(time.monotonic())
        await mesh.take_devices()
        await asyncio.sleep(0.01)
        assert link.delivered == [5] and colocation.is_with_trainer
        watching.cancel()

    asyncio.run(run())


class SlowLink(WeightLink):
    """Replicas connect when they are let; notes who took what."""

    def __init__(self):
        super().__init__(None, "auto", seconds=1.0)
        self.plan, self.version, self.taken, self.may_connect = "a plan", 4, [], asyncio.Event()
        self._staged = {4}

    async def _connect(self, replica: Replica) -> None:
        await self.may_connect.wait()

    async def _fetch_and_apply(self, replica: Replica, version: int, routes: list) -> None:
        self.taken.append((replica.number, version))


def test_a_replica_that_is_brought_up_as_a_version_goes_out_takes_that_version_too():
    """Or else it would be given work under the one before, as if that were live."""

    async def run():
        link, healthy = SlowLink(), [Replica(0)]

        async def comes(replica: Replica) -> None:
            await link.bring_up(replica)
            healthy.append(replica)

        coming = asyncio.ensure_future(comes(Replica(1)))
        await asyncio.sleep(0)
        delivery = asyncio.ensure_future(link.announce(5, lambda: list(healthy), failed=None))
        await asyncio.sleep(0)
        link.may_connect.set()
        await asyncio.gather(coming, delivery)
        assert link.taken == [(1, 4), (0, 5), (1, 5)]

    asyncio.run(run())


def test_a_replica_that_is_brought_up_after_a_repair_takes_the_version_that_was_published_again():
    """The live one went with the regions of before, and would be waited for until a deadline, with all others."""

    async def run():
        link = SlowLink()
        link.may_connect.set()
        link.trainers, link.setting = SimpleNamespace(ranks=[], of_policy=[]), "auto"
        await link.stage(4)
        await link.bring_up(Replica(0))
        await link._open()
        with pytest.raises(RuntimeError, match="the trainer is being repaired"):
            await link.bring_up(Replica(1))
        assert link.is_broken
        await link.resume(5)
        await link.bring_up(Replica(1))
        link.version = 5
        await link.stage(6)
        await link.bring_up(Replica(2))
        assert link.taken == [(0, 4), (1, 5), (2, 5)] and not link.is_broken

    asyncio.run(run())


def test_a_trainer_that_cannot_be_repaired_ends_the_run_though_nobody_asks_for_it():
    fault = OSError("its checkpoint cannot be read")

    async def watch() -> None:
        raise fault

    faults = []
    meshes = SimpleNamespace(trainer=SimpleNamespace(watch=watch), _on_fault=faults.append)
    asyncio.run(Meshes._watch_trainer(meshes))
    assert faults == [fault]
