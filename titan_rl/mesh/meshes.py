"""All actors of a run, wired: started together, replaced when they die, and gone when the run is.

    ActorProcesses ◀─ Roles ◀─ Trainers ◀─ WeightLink ◀─ Generators ◀─ TrainerSnapshots ◀─ TrainerMesh
                                                            ▲                                   ▲
                                        Verifiers ◀──────────────────────────────────────── WeightSync ◀─ Dispatcher

Each is given what it needs when it is made, and knows nothing of what stands to its right. What has to follow a repair
of the trainer (its snapshots, the weight channel) is handed to TrainerMesh as a list.
"""

import asyncio
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from monarch.config import configure

from titan_rl.compat.monarch.actors import pass_on_unknown_faults, unknown_faults_logged
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.colocation import Colocation, NoColocation
from titan_rl.mesh.control.dispatcher import Dispatcher
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.control.helpers import HelperTurns
from titan_rl.mesh.control.trainer_repair import CatchUp, TrainerMesh
from titan_rl.mesh.control.trainer_snapshots import TrainerSnapshots
from titan_rl.mesh.control.weight_sync import WeightSync
from titan_rl.mesh.forking.forking import FORK_SERVERS
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.hosts.remote_hosts import HostNeeds, RemoteHosts
from titan_rl.mesh.launch.base import HostLauncher, Launcher
from titan_rl.mesh.launch.local import LocalLauncher
from titan_rl.mesh.launch.torchrun import OtherRanks
from titan_rl.mesh.members.endpoints import GeneratorEndpoints
from titan_rl.mesh.members.roles import RoleProcesses, Roles
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.members.verifiers import Verifiers
from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.processes.deadlines import within
from titan_rl.mesh.processes.processes import ending
from titan_rl.mesh.processes.reaper import start_reaper
from titan_rl.mesh.resources.cores import (
    Crew,
    available_cores,
    generator_environment,
    share_cores,
    trainer_environment,
    verifier_environment,
)
from titan_rl.mesh.resources.devices import Devices, seats_of
from titan_rl.mesh.resources.listeners.sockets import abstract_listeners, open_privately
from titan_rl.mesh.resources.open_files import raise_open_files
from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch
from titan_rl.mesh.supervision.actor_process import ActorProcess, ActorProcesses
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.telemetry.step_record import StepRecord
from titan_rl.mesh.telemetry.stragglers import Stragglers
from titan_rl.mesh.weights.channel_link import WeightLink

ALL_PARTS = frozenset({"trainer", "generators", "verifiers"})
"""Generators are needed by verifiers; a trainer stands alone."""
_STOP_SECONDS = 3.0
"""Seconds that processes have to stop by themselves; then they are killed."""


class Owner(Protocol):
    """Owner of some of the actors."""

    async def start(self) -> None:
        """Start the actors."""
        ...


@dataclass(frozen=True)
class ActorClasses:
    """Classes of the actors; a bench substitutes its own."""

    trainer: type
    generator: type
    verifier: type
    role: type


@dataclass(frozen=True)
class Ranks:
    """Number of processes of the policy and of each role."""

    policy: int
    own_roles: Mapping[str, int] = field(default_factory=dict)
    """Of roles that never learn and have processes of their own."""
    learned_roles: Mapping[str, int] = field(default_factory=dict)
    """Of roles that learn in processes of their own, which are further ranks of the trainer."""

    @property
    def of_trainer(self) -> dict[str, int]:
        """Number of ranks by name: the policy's, then those of learned roles."""
        return {"trainer": self.policy, **self.learned_roles}


@dataclass(frozen=True)
class MeshCallbacks:
    """Callbacks on events of the actors."""

    log: Callable[[str], None] = print
    """Of deaths and repairs, for people."""
    record_event: Callable[..., None] = lambda kind, **fields: None
    """``record_event(kind, **fields)``: of starts, deaths and repairs, for the record."""
    on_retry: Callable[[str], None] = lambda prompt_id: None
    """Of each prompt that is sampled again since somebody died or failed."""
    on_lost: Callable[[str], None] = lambda why: None
    """Why the run must end: a process of torchrun's died, or another controller has gone on with the run."""
    on_fault: Callable[[Exception], None] = lambda fault: None
    """The fault that the run must end with, even if no call raises it: the trainer could not be repaired."""


@dataclass(frozen=True)
class ProcessPlacement:
    """Placement of the actors' processes on hosts and devices."""

    launcher: Launcher | None = None
    """How worker loops are started (``mesh.worker_loops``); None: on this machine."""
    ranks: OtherRanks | None = None
    """torchrun's other processes, as hosts instead."""
    devices: Devices | None = None
    """Which process is on which GPU; None on a CPU."""
    host_launcher: HostLauncher | None = None
    """Brings up hosts of other machines, on which all processes are then."""
    on_hosts: Mapping[str, Any] = field(default_factory=dict)
    """What is known of those (fields of ``HostNeeds``)."""


class MeshOptions(TypedDict, total=False):
    """Keywords of ``Meshes`` that have defaults."""

    kept_policy: str
    parts: frozenset[str]
    logs: Path | None
    catch_up: CatchUp | None
    callbacks: MeshCallbacks
    placement: ProcessPlacement


class Meshes:
    """Owner of all actors of a run. Only ``parts`` are started."""

    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        ranks: Ranks,
        max_tokens: int,
        on_cpu: bool,
        actors: ActorClasses,
        kept_policy: str = "",
        parts: frozenset[str] = ALL_PARTS,
        logs: Path | None = None,
        catch_up: CatchUp | None = None,
        callbacks: MeshCallbacks | None = None,
        placement: ProcessPlacement | None = None,
    ):
        """Nothing is started yet.

        ``kept_policy``: where the run keeps the policy (``trainer.roles.names.role_paths``). ``max_tokens``: of a
        prompt with its answer. ``logs``: a folder for what the processes print. ``catch_up``: without it a dead trainer
        ends the run."""
        callbacks, where = callbacks or MeshCallbacks(), placement or ProcessPlacement()
        log, record_event, devices = callbacks.log, callbacks.record_event, where.devices
        self.config, self.model_path, self.max_tokens, self.parts = config, model_path, max_tokens, parts
        self.stragglers, self.record = Stragglers(), StepRecord()
        self._background = BackgroundTasks()
        self.log, self._on_fault = log, callbacks.on_fault
        self._scratch = scratch = make_scratch()
        self._remove_scratch = weakref.finalize(self, remove_scratch, scratch)
        threads = share_cores(
            available_cores(),
            sum(ranks.of_trainer.values()),
            config.generator.replicas * config.generator.tensor_parallel,
            alternating=config.rollout.max_staleness == 0,
        )
        folder = None if logs is None else str(logs)
        self._remote = (
            None
            if where.host_launcher is None
            else self._make_hosts(where.host_launcher, ranks.policy, where.on_hosts, folder, on_lost=callbacks.on_lost)
        )
        self.processes = ActorProcesses(
            folder,
            scratch,
            config.mesh.worker_loops,
            launcher=where.launcher or LocalLauncher(),
            record_event=record_event,
            ranks=where.ranks,
            on_lost=callbacks.on_lost,
            remote=self._remote,
        )
        run = RunContext(self.processes, config, HostPath(model_path), HostPath(kept_policy), scratch, log)
        environment = trainer_environment(threads)
        self.roles = Roles(
            [
                RoleProcesses(role, actors.role, run, count, environment, seats_of(devices, role))
                for role, count in ranks.own_roles.items()
            ]
        )
        self.trainers = Trainers(
            actors.trainer,
            run,
            ranks.of_trainer,
            environment,
            self.stragglers,
            self.roles,
            seats=seats_of(devices, *ranks.of_trainer),
            record=self.record,
        )
        scale = config.lora.alpha / config.lora.rank if config.sends_adapters else None
        patience = config.mesh.step_timeout
        link = WeightLink(self.trainers, config.mesh.transport, patience, self.record, record_event, scale)
        helps = config.placement.helper_generators > 0 and {"trainer", "generators"} <= parts
        on_trainers_cores = replace(threads, generator=threads.trainer)
        self.generators = Generators(
            *(actors.generator, run, max_tokens, generator_environment(threads, on_cpu), link, devices),
            helper_environment=generator_environment(on_trainers_cores, on_cpu) if helps else None,
        )
        self._colocation = self._make_colocation(link)
        self.verifiers = Verifiers(actors.verifier, run, verifier_environment())
        owners = {"trainer": self.trainers, "generators": self.generators, "verifiers": self.verifiers}
        self._owners = [owner for part, owner in owners.items() if part in parts]
        standbys = [owner.standby for owner in self._owners]
        self._snapshots = self._make_snapshots()
        links = [link] if "generators" in parts else []
        followers = links if self._snapshots is None else [self._snapshots, *links]
        self.trainer = TrainerMesh(
            self.trainers,
            self._snapshots,
            followers,
            standbys,
            colocation=self._colocation,
            catch_up=catch_up,
            log=log,
            record_event=record_event,
        )
        self.weights = WeightSync(self.trainer, link, self.generators, self.verifiers, self.stragglers)
        self.dispatcher = Dispatcher(
            config, self.generators, self.verifiers, on_retry=callbacks.on_retry, weights=self.weights
        )

    def _make_hosts(
        self,
        launcher: HostLauncher,
        world_size: int,
        on_hosts: Mapping[str, Any],
        logs: str | None,
        on_lost: Callable[[str], None],
    ) -> RemoteHosts:
        config = self.config
        counts = {"trainer": world_size, "generator": config.generator.replicas * config.generator.tensor_parallel}
        crew = Crew(counts, alternating=not config.rollout.max_staleness)
        fields = {"home": None, **on_hosts}
        needs = HostNeeds(model=Path(self.model_path), crew=crew, can_fork=self._can_fork, **fields)
        seconds = config.mesh.start_timeout
        return RemoteHosts(launcher, config.hosts, needs, seconds=seconds, logs=logs, log=self.log, on_lost=on_lost)

    def _make_colocation(self, link: WeightLink) -> NoColocation:
        owners = self.trainers, self.generators, link, self.config.mesh.step_timeout, self.record
        if self.generators.helpers:
            return HelperTurns(*owners)
        is_colocated = self.config.placement.mode == "colocated" and {"trainer", "generators"} <= self.parts
        return Colocation(*owners) if is_colocated else NoColocation()

    def _make_snapshots(self) -> TrainerSnapshots | None:
        """None if the config wants none."""
        if not self.config.recovery.snapshot_every:
            return None
        snapshots = TrainerSnapshots(self.trainers, self.generators, self.config.mesh.step_timeout)
        # a keeper of snapshots may have gone with a generator, and a new generator may be one
        self.generators.on_change(lambda: self._background.start(snapshots.place_keepers()))
        return snapshots

    async def start(self) -> None:
        """Spawn all processes and load all models, side by side. Errors: DeadlineError, ActorDied, an actor's own."""
        self._configure_monarch()
        if raised := raise_open_files():
            self.log(raised)
        start_reaper(self.processes.mark, [self._scratch, self._open_privately()])
        if self._remote is not None:
            await self._remote.open()
        if self._can_fork and self._remote is None:
            self.processes.forks.start()
        self._background.start(self.processes.patrol())
        owners = [*self._owners, self.roles] if "trainer" in self.parts else self._owners
        await self._colocation.begin()
        starts = asyncio.gather(*map(self._start, owners))
        await within(self.config.mesh.start_timeout, "starting the actors", starts)
        if {"trainer", "generators"} <= self.parts:
            await self.weights.connect()
            await within(self.config.mesh.start_timeout, "starting helper generators", self._colocation.start())
            self._background.start(self.weights.watch())
            self._background.start(self._colocation.watch())
        if "trainer" in self.parts:
            if self._snapshots is not None:
                await self._snapshots.reopen()
            self._background.start(self._watch_trainer())
        if "generators" in self.parts and self.config.recovery.warm_spares:
            self.generators.prepare()

    async def _watch_trainer(self) -> None:
        """End the run when the trainer cannot be repaired, even if nothing calls it."""
        try:
            await self.trainer.watch()
        except Exception as fault:  # whatever a repair failed of: nobody else hears of it
            self._on_fault(fault)

    async def _start(self, owner: Owner) -> None:
        await owner.start()
        if owner is self.trainers:
            await self._colocation.give()

    @property
    def _can_fork(self) -> bool:
        """A launcher of one's own may give its hosts namespaces or limits, which a server's forks would not have; and
        what is preloaded (allocators, OpenMP) need not survive a fork of ours."""
        mesh = self.config.mesh
        is_ours = mesh.launcher == "local" or not mesh.worker_loops
        is_plain = FORK_SERVERS in os.environ or not os.environ.get("LD_PRELOAD")
        return mesh.fork_servers and is_ours and is_plain

    def _configure_monarch(self) -> None:
        if self._remote is not None:
            self._remote.configure_monarch()
        configure(
            # the kernel tells of deaths, and patrols and deadlines of hangs: a busy process must not be taken for dead
            get_actor_state_max_idle=self._patience,
            get_proc_state_max_idle=self._patience,
            cleanup_timeout="500ms",
            enable_log_forwarding=False,
            # a fork's parent is its server, which may die: what it ends with is its client (fork_client.py)
            mesh_bootstrap_enable_pdeathsig=not self._can_fork,
            rdma_allow_tcp_fallback=self.config.mesh.transport != "rdma_ibverbs",
            rdma_disable_ibverbs=self.config.mesh.transport == "rdma_tcp",
            rdma_tcp_fallback_parallelism=1,
            rdma_max_chunk_size_mb=16,
        )
        pass_on_unknown_faults()  # owners of actor processes know of theirs already

    @property
    def _patience(self) -> str:
        """A process that Monarch has not heard of for so long counts as dead to it: later than a silent host to us."""
        return "30s" if self._remote is None else f"{int(30 + 2 * self.config.hosts.silence)}s"

    def _open_privately(self) -> Path:
        if str(self._scratch.parent) != tempfile.gettempdir():
            self.log(f"TMPDIR is too long for sockets: temporary files are in {self._scratch.parent}")
        folder = open_privately()
        if names := abstract_listeners():
            self.log(f"other users of this host can connect to sockets that this process had opened before: {names}")
        return folder

    @property
    def pids(self) -> dict[int, str]:
        """Process id to name, of all that live; scorers included."""
        names = self.processes.names()
        alive = set(names.values())
        scorers = self.verifiers.scorers.items()
        return names | {pid: f"scorer {number}" for number, pid in scorers if f"verifier {number}" in alive}

    @property
    def hosts(self) -> dict[str, str]:
        """Of each process, by its name, that on which it was spawned; a verifier's scorer is where that is."""
        hosts = {process.name: process.host.name for process in self.processes.all}
        return hosts | {f"scorer {n}": hosts.get(f"verifier {n}", "") for n in self.verifiers.scorers}

    async def take_statistics(self) -> list[EngineStatistics]:
        """Each engine's statistics since its last update; they start anew. Of those that answer."""
        request, seconds = GeneratorEndpoints.take_statistics(), self.config.mesh.step_timeout
        calls = (
            call(replica.ranks[0], request, seconds=seconds, what="taking statistics")
            for replica in list(self.generators.replicas.values())
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, EngineStatistics)]

    async def stop(self) -> None:
        """Stop all actors; what is still there after a while is killed. Never raises, never hangs."""
        self._background.cancel()
        self.processes.are_stopping = True
        for owner in (*self._owners, self.trainer, self.weights):
            owner.stop()
        with unknown_faults_logged(self.log):
            stops = [asyncio.ensure_future(self._stop(process)) for process in reversed(self.processes.all)]
            if stops:
                await asyncio.wait(stops, timeout=_STOP_SECONDS)
            if self._remote is not None:
                await self._remote.close()
            for _ in ending(self.processes.mark, _STOP_SECONDS):
                await asyncio.sleep(0.05)
        self._remove_scratch()

    async def _stop(self, process: ActorProcess) -> None:
        if process.is_dead:
            return
        try:
            await process.procs.stop()
        except Exception as error:  # what cannot stop in good order is killed
            self.log(f"stopping {process.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
