"""Calls to the trainer, repaired where a rank dies.

    a rank dies ─▶ what was kept of it is found ─▶ a standby takes its place ─▶ all ranks join anew
                                                                                     │
      the call is made again ◀─ followers resume ◀─ catch_up ◀─ followers reopen ◀─ one common step

What lies below (trainers.py, snapshots.py) knows nothing of repairs; what has to follow one is given at construction.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from titan_rl.data.callbacks import OnLoss, ignore_loss
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, StepMetrics
from titan_rl.mesh.control.colocation import NoColocation
from titan_rl.mesh.control.trainer_snapshots import TrainerSnapshots
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorFault, ActorProcess, last_line
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.supervision.run_files import collect
from titan_rl.mesh.supervision.standby import Standby

T = TypeVar("T")
CatchUp = Callable[[Trainers, int | None], Awaitable[int]]
"""Brings a trainer that is at this step (None: the weights of the file) to the step that the run has done; it calls
the ranks directly. The number of steps that were done again."""

_NEWS_SECONDS = 0.5
"""How long a death is waited for that would explain an error."""
_MAX_RAISED = 2
"""How often a trainer rank may raise the same, without a step in between, and be replaced."""
_COMPUTE = {TrainerEndpoints.load_checkpoint.name}
"""Endpoints that want all of the state where it is computed with."""
_MAX_REPAIRS = 5
"""How often the trainer may be repaired without a step in between."""


class Follower(Protocol):
    """Dependent of the trainer's ranks, notified after a repair."""

    async def reopen(self) -> None:
        """Reopen after a restart of all ranks, possibly at an earlier step."""
        ...

    async def resume(self, step: int) -> None:
        """Resume at the run's step, after the catch-up."""
        ...


class TrainerMesh:
    """Trainer with repair of dead ranks.

    Errors of all calls: ActorFault; whatever an actor raises with all ranks alive.
    """

    def __init__(
        self,
        trainers: Trainers,
        snapshots: TrainerSnapshots | None,
        followers: Sequence[Follower],
        standbys: Sequence[Standby],
        *,
        colocation: NoColocation,
        catch_up: CatchUp | None,
        log: Callable[[str], None],
        record_event: Callable[..., None],
    ):
        """``snapshots``: None where the config wants no recovery, and then a death ends the run; so it does without
        ``catch_up``. ``followers``: in the order in which they follow. ``standbys``: prepared after each step, since
        the imports of earlier ones would slow the start. ``colocation``: taken for whatever computes."""
        self.trainers, self.snapshots, self.followers, self.standbys = trainers, snapshots, followers, standbys
        self._catch_up, self.log, self.record_event = catch_up, log, record_event
        self.colocation = colocation
        self.step_done = 0
        """Steps that the run counts as done: a repaired trainer never starts from a later one."""
        self._lock = asyncio.Lock()
        self._calls = BackgroundTasks()
        self._num_repairs = self.num_repaired = 0
        """Repairs since the last step, and in all."""
        self._unrepaired: list[ActorProcess] = []
        """The dead of a repair that has not come to its end: until then no rank may compute."""
        self._own: Batch | None = None
        self._gradients_since = -1
        """The number of repairs before these gradients were made: one since, and they are gone."""
        self._raised: Counter[str] = Counter()
        """Why trainers were ended that raised since the last step."""

    # calls

    async def train(self, batches: list[Batch], step: int) -> list[StepMetrics | NonfiniteBatch]:
        """Run a step's optimizer steps, one a batch; repeated if a rank dies."""
        metrics = await self.ask(lambda: self.trainers.train(batches, step))
        self._has_done(step)
        return metrics

    def _has_done(self, step: int) -> None:
        self.step_done, self._num_repairs = step, 0
        self._raised.clear()
        for standby in self.standbys:
            standby.make()

    async def forward_backward(self, batch: Batch) -> StepMetrics | NonfiniteBatch:
        """Compute the gradients of one update, for a custom training loop; ``optim_step`` applies them."""
        self._own = batch
        return await self.ask(self._gradients)

    async def optim_step(self, step: int) -> StepMetrics | NonfiniteBatch:
        """Apply the update; gradients are recomputed after a repair."""
        answer = await self.ask(lambda: self._update(step))
        self._has_done(step)
        return answer

    async def _gradients(self) -> StepMetrics | NonfiniteBatch:
        metrics = await self.trainers.forward_backward(self._own_batch())
        self._gradients_since = self.num_repaired
        return metrics

    def _own_batch(self) -> Batch:
        assert self._own is not None  # ``forward_backward`` comes first
        return self._own

    async def _update(self, step: int) -> StepMetrics | NonfiniteBatch:
        if self._gradients_since != self.num_repaired:
            await self._gradients()
        return await self.trainers.optim_step(self._own_batch().has_signal, step)

    async def sft(self, batches: list[list[list]], on_step: OnLoss = ignore_loss) -> list[float]:
        """Run supervised steps; ``batches[i][group]`` are rows. Losses, one a batch, also told to ``on_step``, from the
        first one on after a repair."""
        return await self.ask(lambda: self.trainers.sft(batches, on_step))

    async def evaluate(self, batch: Batch, name: str = "") -> StepMetrics:
        """Loss metrics of rows without an update, by the named algorithm or the run's."""
        return await self.ask(lambda: self.trainers.evaluate(batch, name))

    async def call(self, request: RemoteCall[T]) -> list[T]:
        """Call an endpoint on all ranks, such as ``save_hf``. Answers by rank."""
        what, computes = f"trainer {request.endpoint}", request.endpoint in _COMPUTE
        return await self.ask(lambda: self.trainers.call(request, what=what), computes=computes)

    async def collect(self, folder: HostPath) -> None:
        """Fetch files that ranks on other hosts wrote below a folder."""
        await collect(self.trainers.ranks, folder)

    async def begin_at(self, step: int) -> None:
        """Set the step of the trainer's state; repairs are possible from now on."""
        self.step_done = step
        if (snapshots := self.snapshots) is not None:
            await self.ask(lambda: snapshots.resume(step))

    async def begin_anew(self) -> None:
        """All ranks take up the settings that hold now, and go on from the newest checkpoint, which must be of the
        run's step."""
        await self.ask(self._begin_anew)

    async def _begin_anew(self) -> None:
        await self.trainers.join()
        await self.trainers.roles.begin_anew()
        await self._go_on_from(None)

    async def take_settings(self) -> None:
        """All ranks take up settings of optimizer, schedule and algorithm; a rank that joins later has them by that."""
        await self.ask(self.trainers.take_settings, computes=False)

    async def take_devices(self) -> None:
        """Put colocated generators to sleep until the next version."""
        await self.ask(_nothing)

    async def wait_until_complete(self) -> None:
        """Wait until no rank is dead."""
        await self.ask(_nothing, computes=False)

    async def watch(self) -> None:
        """Repair deaths between calls, for the whole run."""
        while True:
            await asyncio.wait({rank.died for rank in self.trainers.ranks}, return_when=asyncio.FIRST_COMPLETED)
            await self.wait_until_complete()

    async def ask(self, work: Callable[[], Awaitable[T]], *, computes: bool = True) -> T:
        """Result of ``work`` with all ranks alive; repeated after each repair.

        One asks at a time. ``computes``: it needs what a rank holds on its device. Who is cancelled leaves the work to
        end by itself, and the next waits for that: a rank whose rows were taken away would leave its process group.
        Errors: ActorFault if that happens too often.
        """
        await self._lock.acquire()
        return await asyncio.shield(self._calls.start(self._do(work, computes)))

    def stop(self) -> None:
        """Cancel all calls."""
        self._calls.cancel()

    async def _do(self, work: Callable[[], Awaitable[T]], computes: bool) -> T:
        """The lock is held, and let go of."""
        try:
            while True:
                try:
                    if self._unrepaired or not self.trainers.is_complete:
                        await self._repair_in_turn(computes)
                    if computes:
                        await self.colocation.take()
                    return await work()
                except ActorDied as error:
                    self.log(str(error))
                    if error.__cause__ is not None:
                        self._note_raised(error)
                except ActorFault:
                    raise
                except Exception as error:  # while a rank is dead, it only tells how others noticed
                    deaths = {rank.died for rank in self.trainers.ranks}
                    await asyncio.wait(deaths, timeout=_NEWS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if not self.trainers.is_complete:
                        continue
                    if not self._unrepaired or self._num_repairs >= _MAX_REPAIRS:
                        raise
                    self.log(f"the repair of {_names(self._unrepaired)} failed and begins again: {last_line(error)}")
        finally:
            self.colocation.release()
            self._lock.release()

    def _note_raised(self, error: ActorDied) -> None:
        """Errors: ActorFault if a trainer raises the same again and again, as a mistake in a program would."""
        self._raised.update(f"{process.name} {process.why}" for process in error.processes)
        if self.snapshots is None or max(self._raised.values()) > _MAX_RAISED:
            raise ActorFault(str(error)) from error.__cause__

    # repair

    async def _repair_in_turn(self, computes: bool) -> None:
        is_interrupted = not self.colocation.is_with_trainer
        await self.colocation.take(dead=True)
        await self._repair()
        if is_interrupted and not computes:
            self.colocation.interrupted.set()

    async def _repair(self) -> None:
        """All of it, or it is begun again with the next call: ranks that have joined have the weights of the file."""
        dead = self.trainers.dead
        self._unrepaired += [process for process in dead.values() if process not in self._unrepaired]
        self._num_repairs, self.num_repaired = self._num_repairs + 1, self.num_repaired + 1
        self._check_repairable(self._unrepaired)
        step = await self._replace(dead)
        redone = await self._go_on_from(step)
        repaired, self._unrepaired = self._unrepaired, []
        seconds = time.monotonic() - min(process.died.result() for process in repaired)
        who = _names(repaired)
        self.record_event("trainer_repaired", who=who, step=step, steps_redone=redone, seconds=seconds)
        why = repaired[0].why
        self.log(f"{who} {why}: replaced, and all ranks at step {self.step_done} again after {seconds:.1f} s")

    async def _go_on_from(self, step: int | None) -> int:
        """All ranks have joined, and are at this step (None: at the file's weights). The number of steps redone."""
        for follower in self.followers:
            await follower.reopen()
        assert self._catch_up is not None
        redone = await self._catch_up(self.trainers, step)
        for follower in self.followers:
            await follower.resume(self.step_done)
        return redone

    def _check_repairable(self, dead: list[ActorProcess]) -> None:
        died = ActorDied(dead, "the run went on")
        if self.snapshots is None or self._catch_up is None:
            raise ActorFault(f"{died}: recovery is off, so this ends the run") from died
        if self._num_repairs > _MAX_REPAIRS:
            times = f"the trainer was repaired {_MAX_REPAIRS} times without a step in between"
            raise ActorFault(f"{times}; at last {died}") from died

    async def _replace(self, dead: dict[int, ActorProcess]) -> int | None:
        """Others for the dead. All ranks are then at the newest step that every one had, no later than the run's.

        None: somebody's state is nowhere, so all have the weights of the file, and must be given a checkpoint.
        """
        assert self.snapshots is not None  # or it could not be repaired
        restorable = await self.snapshots.find()
        await self.trainers.replace(dead)
        await self.trainers.join()
        step = restorable.newest(self.step_done)
        if step is not None:
            await self.snapshots.restore(restorable, step)
        return step


def _names(processes: list[ActorProcess]) -> str:
    return ", ".join(dict.fromkeys(process.name for process in processes))


async def _nothing() -> None:
    """Asks the trainer for nothing but to be complete."""
