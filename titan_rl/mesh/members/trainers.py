"""The trainer's ranks, as they are: started together, called together. Here nothing is repaired (trainer_repair.py).

When a rank dies the others keep their process and their memory. A standby with its imports done takes the dead one's
place, and all join a new process group.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from titan_rl.data.callbacks import OnLoss, ignore_loss
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, StepMetrics
from titan_rl.mesh.channel.batches import StagedRows
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.members.roles import Roles
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.resources.devices import Seat
from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.mesh.supervision.calls import call, call_each, started
from titan_rl.mesh.supervision.peers import PeerNotifier
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.supervision.rendezvous import rendezvous
from titan_rl.mesh.supervision.run_files import collect, spread
from titan_rl.mesh.supervision.standby import Standby
from titan_rl.mesh.telemetry.step_record import StepRecord
from titan_rl.mesh.telemetry.stragglers import Stragglers

R = TypeVar("R")
_READ = {TrainerEndpoints.load_checkpoint.name, TrainerEndpoints.load_role.name}
_WRITTEN = {TrainerEndpoints.save_hf.name: 3}
"""Endpoints whose last argument is a folder that every rank reads; and those that write, with how many of their first
arguments are folders."""


class Trainers:
    """Trainer ranks and their standby. Errors of all calls: ActorDied; whatever an actor raises while it starts."""

    def __init__(
        self,
        actor: type,
        run: RunContext,
        sides: Mapping[str, int],
        environment: dict[str, str],
        stragglers: Stragglers,
        roles: Roles,
        seats: Sequence[Seat] = (),
        record: StepRecord | None = None,
    ):
        """``sides``: the number of ranks of the policy, and behind them of the role that learns in processes of its
        own, if there is one.
        ``stragglers``: gets every step's times of each rank. ``roles``: what else is asked about a step's rows.
        ``seats``: each rank's GPU; none on a CPU. ``record``: gets what ranks tell of a step besides."""
        self.processes, self.config, self.scratch, self._log = run.processes, run.config, run.scratch, run.log
        self._sides = [(side, rank) for side, count in sides.items() for rank in range(count)]
        """Of each rank: its side, and its rank there."""
        self.world_size, self._policy_ranks = len(self._sides), next(iter(sides.values()))
        self.standby = Standby(
            run.processes, run.config, "trainer", environment, actor, run.model_path, run.kept_policy
        )
        self.ranks: list[ActorProcess] = []
        self._peers = PeerNotifier(lambda: self.ranks)
        self._stragglers, self.roles, self._seats = stragglers, roles, seats
        self._record = record or StepRecord()
        self._num_rendezvous = 0

    async def start(self) -> None:
        self.ranks = list(await asyncio.gather(*map(self._take, range(self.world_size))))
        for process in self.ranks:
            self._peers.watch(process)
        await started(self._join_all, self._log)

    async def _join_all(self) -> None:
        """With others in place of ranks that have died."""
        await self.replace(self.dead)
        await self.join()

    async def _take(self, rank: int) -> ActorProcess:
        return await self.standby.take(self._name(rank), *(seat.host for seat in self._seats[rank : rank + 1]))

    def _name(self, rank: int) -> str:
        """Such as ``trainer rank 0`` or ``critic rank 0``."""
        side, number = self._sides[rank]
        return f"{side} rank {number}"

    @property
    def of_policy(self) -> list[ActorProcess]:
        """The ranks that hold the policy."""
        return self.ranks[: self._policy_ranks]

    async def join(self) -> None:
        """Join all ranks in a new process group, with the file's weights."""
        self._num_rendezvous += 1
        meeting = await rendezvous(self.ranks, self.scratch / f"trainer{self._num_rendezvous}")
        devices = [[seat.device for seat in self._seats[rank : rank + 1]] for rank in range(self.world_size)]
        joins = [
            (process, TrainerEndpoints.join(self.config, rank, self.world_size, meeting, *devices[rank]))
            for rank, process in enumerate(self.ranks)
        ]
        await call_each(joins, seconds=self.config.mesh.start_timeout, what="joining the trainer's ranks")

    @property
    def is_complete(self) -> bool:
        """Whether no rank is dead."""
        return not self.dead

    @property
    def dead(self) -> dict[int, ActorProcess]:
        """Dead processes by rank."""
        return {rank: process for rank, process in enumerate(self.ranks) if process.is_dead}

    async def replace(self, dead: dict[int, ActorProcess]) -> None:
        """Replace dead ranks one by one; ``join`` comes next."""
        for rank, process in dead.items():
            self.processes.forget(process)
            self.ranks[rank] = await self._replacement(rank)

    async def _replacement(self, rank: int) -> ActorProcess:
        """With its imports done: its peers wait for it in ``join``, and if it died there, they would fail too."""
        name, process = self._name(rank), await self._take(rank)
        seconds, what = self.config.mesh.start_timeout, f"preparing {name}"
        await call(process, TrainerEndpoints.prepare(), seconds=seconds, what=what)
        return self._peers.watch(process)

    # calls

    async def call(self, request: RemoteCall[R], *, what: str) -> list[R]:
        """Answers of all ranks. A rank that raises is ended. Errors: ActorDied, caused by what was raised."""
        calls = [(process, request) for process in self.ranks]
        seconds = self.config.mesh.step_timeout
        if request.endpoint in _READ:
            await spread(self.ranks, request.arguments[-1])
        answers = await call_each(calls, seconds=seconds, what=what, one_fails_all=True)
        if request.endpoint in _WRITTEN:
            await collect(self.ranks, *request.arguments[: _WRITTEN[request.endpoint]])
        return answers

    async def train(self, batches: list[Batch], step: int) -> list[StepMetrics | NonfiniteBatch]:
        """Run a step's optimizer steps, one a batch (``rows[group]`` are its rows).

        With the last one a snapshot is taken, if the config wants one of this step.
        """
        with self._staged_by_group([batch.rows for batch in batches]) as handles:
            role_outputs = await self.roles.compute_outputs(handles)
            has_signal, snapshot = [batch.has_signal for batch in batches], self._snapshot_of(step)
            training = TrainerEndpoints.train(handles, role_outputs, has_signal, snapshot)
            answers = await self.call(training, what=f"training step {step}")
        for side in dict(self._sides):
            of_side = zip(self._sides, self.ranks, answers, strict=True)
            times = {rank.name: seconds for (its, _), rank, (_, seconds, _) in of_side if its == side}
            self._stragglers.note(side, times)
        reports = {rank.name: report for rank, (*_, report) in zip(self.ranks, answers, strict=True)}
        self._record.trained(reports, [rank.name for rank in self.of_policy])
        return answers[0][0]

    def _snapshot_of(self, step: int) -> int | None:
        """The step, if the config wants a snapshot of it."""
        every = self.config.recovery.snapshot_every
        return step if every and step % every == 0 else None

    async def forward_backward(self, batch: Batch) -> StepMetrics | NonfiniteBatch:
        """Compute the gradients of a step's one update; ``optim_step`` applies them."""
        with self._staged_by_group([batch.rows]) as handles:
            role_outputs = await self.roles.compute_outputs(handles)
            return (await self.call(TrainerEndpoints.forward_backward(handles, role_outputs), what="making gradients"))[
                0
            ]

    async def optim_step(self, has_signal: bool, step: int) -> StepMetrics | NonfiniteBatch:
        update = TrainerEndpoints.optim_step(has_signal, self._snapshot_of(step))
        return (await self.call(update, what=f"the update of step {step}"))[0]

    async def sft(self, batches: list[list[list]], on_step: OnLoss = ignore_loss) -> list[float]:
        """Run supervised steps; ``batches[i][group]`` are rows. Losses, one a batch, also told to ``on_step``."""
        losses: list[float] = []
        for batch in batches:
            with self._staged_by_group([batch]) as handles:
                steps = TrainerEndpoints.sft(handles, len(batches))
                losses += (await self.call(steps, what="training on demonstrations"))[0]
            on_step(len(losses), losses[-1])
        return losses

    async def take_settings(self) -> None:
        """Apply settings of optimizer, schedule and algorithm on all ranks."""
        await self.call(TrainerEndpoints.take_settings(self.config), what="changing the trainer's settings")

    async def evaluate(self, batch: Batch, name: str = "") -> StepMetrics:
        """Loss metrics of rows without an update, by the named algorithm or the run's."""
        with self._staged_by_group([batch.rows]) as handles:
            role_outputs = await self.roles.compute_outputs(handles)
            return (await self.call(TrainerEndpoints.evaluate(handles, role_outputs, name), what="evaluating"))[0]

    def _staged_by_group(self, batches: list[list[list]]) -> StagedRows:
        """``batches[i][group]`` are rows; a group gets its rows of all batches at once."""
        rows = [list(steps) for steps in zip(*batches, strict=True)]
        return StagedRows.by(rows, self.config.mesh.transport)

    def stop(self) -> None:
        self._peers.stop()
        self.standby.stop()
