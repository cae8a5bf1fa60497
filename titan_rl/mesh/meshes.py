"""The three meshes of a run on this host: spawned together, watched, and gone when the run is.

Monarch's supervision is tuned before its import, so this module is the only one to import monarch in the controller.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")

import monarch.actor
from monarch.actor import default_bootstrap_cmd, this_host
from monarch.config import configure

from titan_rl.channel.batches import LaidRows
from titan_rl.channel.sync import WeightSync
from titan_rl.channel.transports import RDMA
from titan_rl.config import Config
from titan_rl.episode import Sampling
from titan_rl.mesh import processes
from titan_rl.mesh.calls import call_all, gather
from titan_rl.mesh.placement import (
    available_cores,
    generator_environment,
    share_cores,
    trainer_environment,
    verifier_environment,
)
from titan_rl.mesh.router import Router
from titan_rl.mesh.waiting import within
from titan_rl.model.device import DEVICE_TYPE
from titan_rl.model.spec import longest_rollout
from titan_rl.titan_config import TitanConfig
from titan_rl.types import EngineStatistics, Group, Prompt


def has_ibverbs() -> bool:
    """Whether this machine has RDMA hardware that Monarch can use."""
    from monarch.rdma import is_ibverbs_available

    return is_ibverbs_available()


ALL_PARTS = frozenset({"trainer", "generators", "verifiers"})
"""Generators are needed by verifiers; a trainer stands alone."""
_STOP_SECONDS = 3.0
"""Seconds that processes have to stop by themselves; then they are killed."""


class ActorFault(RuntimeError):
    """An actor process died or failed; says which."""


@contextmanager
def _interrupts_ignored():
    """What is spawned here never sees Ctrl-C: stopping is the controller's business."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Meshes:
    """Owns every actor of a run and the weight channel between them."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        model_path: str,
        parts: frozenset[str] = ALL_PARTS,
        logs: Path | None = None,
    ):
        self.config, self.titan, self.model_path, self.parts = config, titan, model_path, parts
        self.logs = None if logs is None else str(logs)
        self.world_size = titan.world_size
        self.max_tokens = longest_rollout(titan.training.seq_len, model_path)
        self.pids: dict[int, str] = {}
        self._mark = processes.new_mark()
        self._fault: asyncio.Future[str] | None = None
        self._proc_meshes = []
        self.router = Router(config.generator.replicas)
        self._verifiers = Router(config.verifier.procs)
        self.say: Callable[[str], None] = print
        """Where a replica's failure is told."""
        self._scratch = tempfile.TemporaryDirectory(prefix="titan_rl_")

    @staticmethod
    def actors() -> tuple[type, type, type]:
        """The classes of trainer, generator and verifier; a bench measures inside its own."""
        from titan_rl.actors.generator import Generator
        from titan_rl.actors.trainer import Trainer
        from titan_rl.actors.verifier import Verifier

        return Trainer, Generator, Verifier

    async def start(self) -> None:
        """Spawn all processes and load all models, side by side. Errors: DeadlineError; whatever an actor raises."""
        Trainer, Generator, Verifier = self.actors()
        configure(
            get_actor_state_max_idle="3s",
            get_proc_state_max_idle="3s",
            cleanup_timeout="500ms",
            enable_log_forwarding=False,
            rdma_allow_tcp_fallback=self.config.mesh.transport != "rdma_ibverbs",
            rdma_disable_ibverbs=self.config.mesh.transport == "rdma_tcp",
            rdma_tcp_fallback_parallelism=1,
            rdma_max_chunk_size_mb=16,
        )
        self._watch_faults()
        config = self.config
        threads = share_cores(
            available_cores(), self.world_size, self._num_generator_ranks, alternating=config.rollout.max_staleness == 0
        )
        starts = []
        if "trainer" in self.parts:
            arguments = (Trainer, self.logs, config, self.model_path, self.world_size)
            self.trainer = self._spawn("trainer", self.world_size, trainer_environment(threads), *arguments)
            starts.append(self._start_trainer())
        if "generators" in self.parts:
            environment = generator_environment(threads, DEVICE_TYPE == "cpu")
            ranks, arguments = config.generator.tensor_parallel, (config.generator, self.model_path, self.max_tokens)
            self.generators = [
                self._spawn(f"generator{replica}", ranks, environment, Generator, self.logs, replica, *arguments)
                for replica in range(config.generator.replicas)
            ]
            starts.append(self._start_generators())
        if "verifiers" in self.parts:
            arguments = (Verifier, self.logs, config, self.model_path)
            self.verifiers = self._spawn("verifier", config.verifier.procs, verifier_environment(), *arguments)
            starts.append(self._start_verifiers())
        await self.guard(config.mesh.start_timeout, "starting the actors", asyncio.gather(*starts))
        if {"trainer", "generators"} <= self.parts:
            await self.guard(config.mesh.start_timeout, "connecting generators to the trainer", self._connect())

    def _spawn(self, name: str, count: int, environment: dict[str, str], actor: type, *arguments):
        with _interrupts_ignored():
            command = default_bootstrap_cmd().with_env(environment | self._mark)
            procs = this_host().spawn_procs(per_host={"ranks": count}, name=name, bootstrap_command=command)
        self._proc_meshes.append(procs)
        return procs.spawn(name, actor, *arguments)

    async def _start_trainer(self) -> None:
        address = await self.trainer.slice(ranks=0).open_store.call_one()
        for point, pid in (await self.trainer.start.call(address)).items():
            self.pids[pid] = f"trainer rank {point.rank}"

    @property
    def _num_generator_ranks(self) -> int:
        return self.config.generator.replicas * self.config.generator.tensor_parallel

    async def _start_generators(self) -> None:
        replicas = await gather(
            *(
                call_all(generator.start, str(Path(self._scratch.name) / f"generator{replica}"))
                for replica, generator in enumerate(self.generators)
            )
        )
        for replica, pids in enumerate(replicas):
            for rank, pid in enumerate(pids):
                self.pids[pid] = f"generator {replica}" + (f" rank {rank}" if len(pids) > 1 else "")

    async def _start_verifiers(self) -> None:
        leaders = [generator.slice(ranks=0) for generator in self.generators]
        for rank, (pid, scorer_pid) in enumerate(await call_all(self.verifiers.start, leaders)):
            self.pids[pid], self.pids[scorer_pid] = f"verifier {rank}", f"scorer {rank}"

    async def _connect(self) -> None:
        self.weights = WeightSync(self.trainer, self.generators, self.router, self.say)
        await self.weights.connect(self.config.mesh.transport)

    # faults

    def _watch_faults(self) -> None:
        loop = asyncio.get_running_loop()
        fault = self._fault = loop.create_future()

        def on_fault(failure) -> None:
            report = str(failure.report() if hasattr(failure, "report") else failure)
            loop.call_soon_threadsafe(lambda: fault.done() or fault.set_result(report))

        monarch.actor.unhandled_fault_hook = on_fault

    async def guard(self, seconds: float, what: str, awaitable):
        """The awaitable's result, under a deadline. Errors: ActorFault as soon as any actor dies; DeadlineError."""
        work = asyncio.ensure_future(within(seconds, what, awaitable))
        await asyncio.wait({work, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise ActorFault(f"{self._who_died()} while {what}: {self._fault.result()}")
        return work.result()

    def _who_died(self) -> str:
        """Monarch's report may name a helper actor of the process that died; we know it by its id."""
        alive = set(processes.running(self._mark))
        dead = [name for pid, name in self.pids.items() if pid not in alive]
        return f"{', '.join(dead)} died" if dead else "an actor failed"

    def acknowledge_fault(self) -> None:
        """What died is known; what is left may be asked, under deadlines alone, to save what it holds."""
        self._fault = asyncio.get_running_loop().create_future()

    # what the loop asks for

    async def train(self, rows: list[list], has_signal: bool):
        """One optimizer step; ``rows[group]``. StepMetrics."""
        with self._lay_down(rows) as handles:
            call = call_all(self.trainer.train, handles, has_signal)
            return (await self.guard(self.config.mesh.step_timeout, "training a batch", call))[0]

    async def warm_up(self, batches: list[list[list]]) -> list[float]:
        """Supervised steps; ``batches[i][group]`` are rows. The losses."""
        with self._lay_down([list(steps) for steps in zip(*batches, strict=True)]) as handles:
            call = call_all(self.trainer.warm_up, handles)
            return (await self.guard(self.config.mesh.step_timeout, "warming up", call))[0]

    def _lay_down(self, rows: list[list]) -> LaidRows:
        return LaidRows(rows, over_rdma=self.config.mesh.transport in RDMA)

    async def publish(self, version: int) -> None:
        """The trainer's part of a new version; the one before must be delivered."""
        what = f"publishing weights version {version}"
        await self.guard(self.config.mesh.step_timeout, what, self.weights.publish(version))

    async def deliver(self, version: int) -> list[EngineStatistics]:
        """Have every replica take a published version; each engine's statistics of the version before."""
        timeout = self.config.mesh.step_timeout
        what = f"updating generators to version {version}"
        return await self.guard(timeout, what, self.weights.deliver(version, timeout))

    async def take_statistics(self) -> list[EngineStatistics]:
        """Each engine's statistics since its last update; they start anew."""
        leaders = (self.generators[replica].slice(ranks=0) for replica in self.router.healthy)
        calls = gather(*(leader.take_statistics.call_one() for leader in leaders))
        return await self.guard(self.config.mesh.step_timeout, "asking generators for statistics", calls)

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Sample and score a prompt, on the verifier and the replica that have the fewest groups.

        A replica that fails is taken out, and another one asked. Errors: NoReplicaLeft.
        """
        while True:
            with self._verifiers.choose() as verifier, self.router.choose() as replica:
                call = self.verifiers.slice(ranks=verifier).run_group.call_one(prompt, sampling, replica)
                group = await self.guard(self.config.verifier.episode_timeout, f"sampling prompt {prompt.id}", call)
            if not group.replica_failure:
                return group
            if replica in self.router.healthy:
                self.say(f"generator {replica} failed and gets no more work: {group.replica_failure}")
            self.router.take_out(replica, group.replica_failure.strip().splitlines()[-1])

    async def demonstrate(self, prompts: list) -> list:
        call = self.verifiers.slice(ranks=0).demonstrate.call_one(prompts)
        return await self.guard(self.config.mesh.step_timeout, "preparing the warm-up", call)

    async def call_trainer(self, endpoint: str, *arguments) -> None:
        """All ranks: ``save_checkpoint``, ``load_checkpoint`` or ``save_hf``."""
        call = call_all(getattr(self.trainer, endpoint), *arguments)
        await self.guard(self.config.mesh.step_timeout, f"trainer {endpoint}", call)

    async def stop(self) -> None:
        """Stop all actors; whatever is still there after a while is killed. Never raises, never hangs."""
        monarch.actor.unhandled_fault_hook = lambda failure: None
        stops = [asyncio.ensure_future(_stop(mesh)) for mesh in reversed(self._proc_meshes)]
        if stops:
            await asyncio.wait(stops, timeout=_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS
        while (left := processes.running(self._mark)) and time.monotonic() < deadline:
            processes.kill(left)
            await asyncio.sleep(0.05)
        self._scratch.cleanup()


async def _stop(mesh) -> None:
    try:
        await mesh.stop()
    except Exception as error:  # a mesh that lost a process cannot stop in good order; the pids are looked after below
        print(f"stopping a mesh: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
