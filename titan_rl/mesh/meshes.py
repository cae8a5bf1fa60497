"""All actors of a run on this host: started together, mended when they die, and gone when the run is.

Each kind has its owner: trainers.py, generators.py, verifiers.py. Here they are wired, and what the loop asks for is
asked of them until it is done. Monarch's supervision is tuned before its import, so the controller imports monarch
through this module alone.
"""

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")

import monarch.actor
from monarch.config import configure

from titan_rl.config.schema import Config
from titan_rl.data.types import EngineStatistics, StepMetrics
from titan_rl.mesh.channel.batches import LaidRows
from titan_rl.mesh.channel.transports import RDMA
from titan_rl.mesh.dispatch import Dispatcher
from titan_rl.mesh.generators import Generators
from titan_rl.mesh.launch.placement import (
    available_cores,
    generator_environment,
    share_cores,
    trainer_environment,
    verifier_environment,
)
from titan_rl.mesh.stragglers import Stragglers
from titan_rl.mesh.supervision import processes
from titan_rl.mesh.supervision.actor_process import CellDied, Cells
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.supervision.deadlines import within
from titan_rl.mesh.supervision.reaper import start_reaper
from titan_rl.mesh.trainers import Trainers
from titan_rl.mesh.verifiers import Verifiers
from titan_rl.mesh.weight_sync import WeightSync
from titan_rl.models.device import DEVICE_TYPE
from titan_rl.models.spec import longest_rollout
from titan_rl.trainer.titan_config import TitanConfig

ALL_PARTS = frozenset({"trainer", "generators", "verifiers"})
"""Generators are needed by verifiers; a trainer stands alone."""
_STOP_SECONDS = 3.0
"""Seconds that processes have to stop by themselves; then they are killed."""
_NEWS_SECONDS = 0.5
"""How long a death is waited for that would explain an error."""
_MAX_RAISED = 2
"""How often a trainer rank may raise the same, without a step in between, and be replaced."""
_MAX_MENDS = 5
"""How often the trainer may be mended without a step in between."""


class ActorFault(RuntimeError):
    """Actors died or failed in a way, or as often, that the run cannot go on; says which."""


class Meshes:
    """Owns the owners."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        model_path: str,
        parts: frozenset[str] = ALL_PARTS,
        logs: Path | None = None,
    ):
        self.config, self.titan, self.model_path, self.parts = config, titan, model_path, parts
        self.max_tokens = longest_rollout(titan.training.seq_len, model_path)
        self.say: Callable[[str], None] = print
        """Where deaths and mendings are told."""
        self.tell: Callable[..., None] = lambda kind, **fields: None
        """Hears of starts, deaths and mendings, for the record."""
        self.catch_up: Callable[[int | None], Awaitable[int]] | None = None
        """Brings a mended trainer, now at this step (None: the file's weights), to where the run is; steps redone."""
        self.weights: WeightSync | None = None
        self.stragglers = Stragglers()
        self._scratch = tempfile.TemporaryDirectory(prefix="titan_rl_")
        self._trainer_lock = asyncio.Lock()
        self._num_mends = 0
        self._raised: Counter[str] = Counter()
        """Why trainers were ended that raised since the last step."""
        self.step_done = 0
        """Steps that the run counts as done: a mended trainer never starts from a later one."""
        self._published: int | None = None
        self._watching: set[asyncio.Task] = set()
        self._make_owners(None if logs is None else str(logs))

    def _make_owners(self, logs: str | None) -> None:
        config, scratch = self.config, Path(self._scratch.name)
        threads = share_cores(
            available_cores(),
            self.titan.world_size,
            config.generator.replicas * config.generator.tensor_parallel,
            alternating=config.rollout.max_staleness == 0,
        )
        self.cells = Cells(logs, scratch, config.mesh.hosts)
        self.cells.tell = lambda kind, **fields: self.tell(kind, **fields)

        def say(text: str) -> None:
            self.say(text)

        trainer, generator, verifier = self.actors()
        path, environment = self.model_path, generator_environment(threads, DEVICE_TYPE == "cpu")
        self.trainers = Trainers(
            trainer, self.cells, config, path, self.titan.world_size, trainer_environment(threads), scratch
        )
        self.generators = Generators(generator, self.cells, config, path, self.max_tokens, environment, scratch, say)
        self.generators.changed = self._find_keepers
        self.verifiers = Verifiers(verifier, self.cells, config, path, verifier_environment(), say)
        self.dispatcher = Dispatcher(config, self.generators, self.verifiers)
        owners = {"trainer": self.trainers, "generators": self.generators, "verifiers": self.verifiers}
        self._owners = [owner for part, owner in owners.items() if part in self.parts]

    @staticmethod
    def actors() -> tuple[type, type, type]:
        """The classes of trainer, generator and verifier; a bench measures inside its own."""
        from titan_rl.actors.generator import Generator
        from titan_rl.actors.trainer import Trainer
        from titan_rl.actors.verifier import Verifier

        return Trainer, Generator, Verifier

    async def start(self) -> None:
        """Spawn all processes and load all models, side by side. Errors: DeadlineError, CellDied, an actor's own."""
        configure(
            # the kernel tells of deaths, patrols and deadlines of hangs: what is merely busy must not be taken for dead
            get_actor_state_max_idle="30s",
            get_proc_state_max_idle="30s",
            cleanup_timeout="500ms",
            enable_log_forwarding=False,
            rdma_allow_tcp_fallback=self.config.mesh.transport != "rdma_ibverbs",
            rdma_disable_ibverbs=self.config.mesh.transport == "rdma_tcp",
            rdma_tcp_fallback_parallelism=1,
            rdma_max_chunk_size_mb=16,
        )
        monarch.actor.unhandled_fault_hook = lambda failure: None  # the cells know
        start_reaper(self.cells.mark)
        self._watch(self.cells.patrol())
        starts = asyncio.gather(*(owner.start() for owner in self._owners))
        await within(self.config.mesh.start_timeout, "starting the actors", starts)
        if {"trainer", "generators"} <= self.parts:
            await self._connect()
        if "trainer" in self.parts:
            await self._protect()
            self._watch(self._mend_when_idle())
        if "generators" in self.parts and self.config.recovery.warm_spares:
            self.generators.prepare()

    def _watch(self, work) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever asks next meets it too
        task.add_done_callback(self._watching.discard)
        self._watching.add(task)

    @property
    def pids(self) -> dict[int, str]:
        return self.cells.names() | {pid: f"scorer {number}" for number, pid in self.verifiers.scorers.items()}

    async def _connect(self) -> None:
        replicas = [replica for _, replica in sorted(self.generators.replicas.items())]
        self.weights = WeightSync(
            self.trainers.ranks, replicas, self.config.mesh.transport, self.config.mesh.step_timeout
        )
        await self.weights.connect()
        self.generators.weights = self.weights

    async def _protect(self) -> None:
        """Snapshots from now on, if the config wants them."""
        if not self.config.recovery.snapshot_every:
            return
        await self.trainers.protect(self.generators.leaders)

    def _find_keepers(self) -> None:
        """Replicas came or went: keepers of snapshots may be among them."""
        if self.config.recovery.snapshot_every:
            self._watch(self.trainers.find_keepers(self.generators.leaders))

    # the trainer

    async def _ask_trainer(self, ask: Callable[[], Awaitable]):
        """The answer of a trainer that is whole, mended if need be. Errors: ActorFault if it takes too often."""
        async with self._trainer_lock:
            while True:
                try:
                    if not self.trainers.is_whole:
                        await self._mend()
                    return await ask()
                except CellDied as error:
                    self.say(str(error))
                    if error.__cause__ is not None:
                        self._note_raised(error)
                except ActorFault:
                    raise
                except Exception:  # while a rank is dead, what others say is only how they noticed
                    deaths = {cell.died for cell in self.trainers.ranks}
                    await asyncio.wait(deaths, timeout=_NEWS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if self.trainers.is_whole:
                        raise

    def _note_raised(self, error: CellDied) -> None:
        """Errors: ActorFault if a trainer raises the same again and again, as a mistake in a program would."""
        self._raised.update(f"{cell.name} {cell.why}" for cell in error.cells)
        if not self.config.recovery.snapshot_every or max(self._raised.values()) > _MAX_RAISED:
            raise ActorFault(str(error)) from error.__cause__

    async def _mend(self) -> None:
        dead = [cell for cell in self.trainers.ranks if cell.is_dead]
        self._num_mends += 1
        if not self.config.recovery.snapshot_every or self.catch_up is None:
            raise ActorFault(f"{CellDied(dead, 'the run went on')}: recovery is off, so this ends the run")
        if self._num_mends > _MAX_MENDS:
            raise ActorFault(f"the trainer was mended {_MAX_MENDS} times without a step in between")
        died = min(cell.died.result() for cell in dead)
        step = await self.trainers.mend(self.step_done)
        await self._protect()
        if self.weights is not None:
            await self.weights.reopen(self.trainers.ranks, list(self.generators.replicas.values()))
        redone = await self.catch_up(step)
        await self._snapshot(self.step_done)
        if self._published is not None:
            await self.weights.publish(self._published)
        seconds, who = time.monotonic() - died, ", ".join(cell.name for cell in dead)
        self.tell("trainer_repaired", who=who, step=step, steps_redone=redone, seconds=seconds)
        self.say(f"{who} {dead[0].why}: replaced, and all ranks at step {step} again after {seconds:.1f} s")

    async def _mend_when_idle(self) -> None:
        """A death that no call meets is mended at once, too."""
        while True:
            await asyncio.wait({cell.died for cell in self.trainers.ranks}, return_when=asyncio.FIRST_COMPLETED)
            await self._ask_trainer(_nothing)

    async def train(self, batches: list, step: int) -> list[StepMetrics]:
        """The optimizer steps that make up a step of the run, each of ``rows[group]``; begun anew if a rank dies."""

        async def ask() -> list[StepMetrics]:
            return await self.train_without_mending(batches, step)

        metrics = await self._ask_trainer(ask)
        self.step_done, self._num_mends = step, 0
        self._raised.clear()
        for owner in self._owners:
            owner.standby.make()  # no earlier, lest its imports slow the start
        return metrics

    async def train_without_mending(self, batches: list, step: int) -> list[StepMetrics]:
        """For ``catch_up``. Errors: CellDied."""
        metrics, what, every = [], f"training step {step}", self.config.recovery.snapshot_every
        for batch in batches:
            snapshot = step if every and step % every == 0 and batch is batches[-1] else None
            with LaidRows(batch.rows, over_rdma=self.config.mesh.transport in RDMA) as handles:
                answers = await self.trainers.call("train", handles, batch.has_signal, snapshot, what=what)
            metrics.append(answers[0])
            wanted = zip(self.trainers.ranks, answers, strict=True)
            self.stragglers.note("trainer", {c.name: getattr(a, "seconds_wanted", 0.0) for c, a in wanted})
        return metrics

    async def _snapshot(self, step: int) -> None:
        if self.config.recovery.snapshot_every:
            await self.trainers.call("take_snapshot", step, what=f"taking the snapshot of step {step}")

    async def begin_at(self, step: int) -> None:
        """The trainer's state is that after a step, whoever brought it there; from here on it can be mended."""
        self.step_done = step
        await self._ask_trainer(lambda: self._snapshot(step))

    async def warm_up(self, batches: list[list[list]]) -> list[float]:
        """Supervised steps; ``batches[i][group]`` are rows. The losses."""
        return await self._ask_trainer(lambda: self.warm_up_without_mending(batches))

    async def warm_up_without_mending(self, batches: list[list[list]]) -> list[float]:
        """For ``catch_up``. Errors: CellDied."""
        rows = [list(steps) for steps in zip(*batches, strict=True)]
        with LaidRows(rows, over_rdma=self.config.mesh.transport in RDMA) as handles:
            return (await self.trainers.call("warm_up", handles, what="warming up"))[0]

    async def call_trainer(self, endpoint: str, *arguments) -> list:
        """All ranks: ``begin_checkpoint``, ``load_checkpoint`` or ``save_hf``, say. Each rank's answer."""
        return await self._ask_trainer(lambda: self.call_trainer_without_mending(endpoint, *arguments))

    async def call_trainer_without_mending(self, endpoint: str, *arguments) -> list:
        """For ``catch_up``. Errors: CellDied."""
        return await self.trainers.call(endpoint, *arguments, what=f"trainer {endpoint}")

    # weights

    async def publish(self, version: int) -> None:
        """The trainer's part of a new version; the one before must be delivered."""
        await self._ask_trainer(lambda: self.weights.publish(version))
        self._published = version

    async def deliver(self, version: int) -> list[EngineStatistics]:
        """Have every replica take a published version; each engine's statistics of the version before."""
        while True:
            deaths = {cell.died for cell in self.trainers.ranks}
            replicas = self.generators.healthy
            work = asyncio.ensure_future(self.weights.deliver(version, replicas, self._update_failed))
            await asyncio.wait({work, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and self.trainers.is_whole:
                steps = {f"generator {s.generator}": s.seconds_busy / s.num_steps for s in work.result() if s.num_steps}
                self.stragglers.note("generator", steps)
                self.stragglers.note("verifier", self.dispatcher.take_scoring_seconds())
                return work.result()
            work.cancel()  # what is awaited may never be stamped
            await asyncio.wait({work})
            await self._ask_trainer(_nothing)

    def _update_failed(self, number: int, reason: str) -> None:
        if not self.trainers.is_whole:
            return  # that is why, and it is delivered again
        self.generators.fail(number, reason)

    async def take_statistics(self) -> list[EngineStatistics]:
        """Each engine's statistics since its last update; they start anew. Of those that answer."""
        calls = (
            call(replica.ranks[0], "take_statistics", seconds=self.config.mesh.step_timeout, what="taking statistics")
            for replica in list(self.generators.replicas.values())
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, EngineStatistics)]

    async def stop(self) -> None:
        """Stop all actors; whatever is still there after a while is killed. Never raises, never hangs."""
        for task in self._watching:
            task.cancel()
        for owner in self._owners:
            owner.stop()
        stops = [asyncio.ensure_future(_stop(cell)) for cell in reversed(self.cells.all) if not cell.is_dead]
        if stops:
            await asyncio.wait(stops, timeout=_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS
        while (left := processes.running(self.cells.mark)) and time.monotonic() < deadline:
            processes.kill(left)
            await asyncio.sleep(0.05)
        self._scratch.cleanup()


async def _nothing() -> None:
    """The trainer is asked for nothing but to be whole."""


async def _stop(cell) -> None:
    try:
        await cell.procs.stop()
    except Exception as error:  # what cannot stop in good order is killed below
        print(f"stopping {cell.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
