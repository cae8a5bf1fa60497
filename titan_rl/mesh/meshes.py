"""The three meshes of a run on this host: spawned together, watched, and gone when the run is.

Monarch's supervision is tuned before its import, so this module is the only one to import monarch in the controller.
"""

import asyncio
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")

import monarch.actor
from monarch.actor import default_bootstrap_cmd, this_host
from monarch.config import configure

from titan_rl.config import Config
from titan_rl.episode import Sampling
from titan_rl.mesh import processes
from titan_rl.mesh.channel import WeightVersion, choose_transport
from titan_rl.mesh.placement import (
    available_cores,
    generator_environment,
    share_cores,
    trainer_environment,
    verifier_environment,
)
from titan_rl.mesh.waiting import within
from titan_rl.model.device import DEVICE_TYPE
from titan_rl.model.spec import longest_rollout
from titan_rl.titan_config import TitanConfig
from titan_rl.types import Group, Prompt

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
        self._groups_at = {"verifier": [0] * config.verifier.procs, "replica": [0] * config.generator.replicas}

    async def start(self) -> None:
        """Spawn all processes and load all models, side by side. Errors: DeadlineError; whatever an actor raises."""
        from titan_rl.actors.generator import Generator
        from titan_rl.actors.trainer import Trainer
        from titan_rl.actors.verifier import Verifier

        configure(
            get_actor_state_max_idle="3s",
            get_proc_state_max_idle="3s",
            cleanup_timeout="500ms",
            enable_log_forwarding=False,
            rdma_allow_tcp_fallback=True,
            rdma_tcp_fallback_parallelism=1,
            rdma_max_chunk_size_mb=16,
        )
        self._watch_faults()
        config = self.config
        threads = share_cores(
            available_cores(), self.world_size, config.generator.replicas, alternating=config.rollout.max_staleness == 0
        )
        starts = []
        if "trainer" in self.parts:
            arguments = (Trainer, self.logs, config, self.model_path, self.world_size)
            self.trainer = self._spawn("trainer", self.world_size, trainer_environment(threads), *arguments)
            starts.append(self._start_trainer())
        if "generators" in self.parts:
            environment = generator_environment(threads, DEVICE_TYPE == "cpu")
            arguments = (config.generator, self.model_path, self.max_tokens)
            self.generators = [
                self._spawn(f"generator{replica}", 1, environment, Generator, self.logs, replica, *arguments)
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

    async def _start_generators(self) -> None:
        pids = await asyncio.gather(*(generator.start.call_one() for generator in self.generators))
        self.pids |= {pid: f"generator {replica}" for replica, pid in enumerate(pids)}

    async def _start_verifiers(self) -> None:
        for point, (pid, scorer_pid) in (await self.verifiers.start.call(self.generators)).items():
            self.pids[pid], self.pids[scorer_pid] = f"verifier {point.rank}", f"scorer {point.rank}"

    async def _connect(self) -> None:
        host = await self.trainer.slice(ranks=0).host.call_one()
        others = await _gather([generator.host.call_one() for generator in self.generators])
        elsewhere = next((other for other in others if other != host), host)
        self.transport = choose_transport(self.config.mesh.transport, host, elsewhere)
        regions = list((await self.trainer.open_region.call(self.transport)).values())
        await asyncio.gather(*(g.connect.call_one(regions, self.transport) for g in self.generators))

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
        """One optimizer step: each rank gets its own rows. StepMetrics."""
        calls = [
            self.trainer.slice(ranks=rank).train.call_one(rank_rows, has_signal) for rank, rank_rows in enumerate(rows)
        ]
        results = await self.guard(self.config.mesh.step_timeout, "training a batch", _gather(calls))
        return results[0]

    async def warm_up(self, batches: list[list[list]]) -> list[float]:
        """Supervised steps; ``batches[i][rank]`` are rows. The losses."""
        calls = [
            self.trainer.slice(ranks=rank).warm_up.call_one([rows[rank] for rows in batches])
            for rank in range(self.world_size)
        ]
        return (await self.guard(self.config.mesh.step_timeout, "warming up", _gather(calls)))[0]

    async def sync_weights(self, version: int) -> list:
        """Publish a version and have every generator apply it; each one's EngineStatistics of the version before."""
        timeout = self.config.mesh.step_timeout
        checksums = await self.guard(
            timeout, f"publishing weights version {version}", _call(self.trainer.publish, version)
        )
        announced = WeightVersion(version, tuple(checksums))
        updates = _gather([g.update.call_one(announced, timeout) for g in self.generators])
        return await self.guard(timeout, f"updating generators to version {version}", updates)

    async def take_statistics(self) -> list:
        """Each engine's statistics since its last update; they start anew."""
        calls = _gather([g.take_statistics.call_one() for g in self.generators])
        return await self.guard(self.config.mesh.step_timeout, "asking generators for statistics", calls)

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Sample and score a prompt, on the verifier and the replica that have the fewest groups."""
        with self._least_busy("verifier") as verifier, self._least_busy("replica") as replica:
            call = self.verifiers.slice(ranks=verifier).run_group.call_one(prompt, sampling, replica)
            return await self.guard(self.config.verifier.episode_timeout, f"sampling prompt {prompt.id}", call)

    @contextmanager
    def _least_busy(self, kind: str):
        groups_at = self._groups_at[kind]
        chosen = groups_at.index(min(groups_at))
        groups_at[chosen] += 1
        try:
            yield chosen
        finally:
            groups_at[chosen] -= 1

    async def demonstrate(self, prompts: list) -> list:
        call = self.verifiers.slice(ranks=0).demonstrate.call_one(prompts)
        return await self.guard(self.config.mesh.step_timeout, "preparing the warm-up", call)

    async def call_trainer(self, endpoint: str, *arguments) -> None:
        """All ranks: ``save_checkpoint``, ``load_checkpoint`` or ``save_hf``."""
        call = _call(getattr(self.trainer, endpoint), *arguments)
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


async def _gather(calls: list) -> list:
    async def wait(call):
        return await call

    return await asyncio.gather(*(wait(call) for call in calls))


async def _call(endpoint, *arguments) -> list:
    return list((await endpoint.call(*arguments)).values())


async def _stop(mesh) -> None:
    try:
        await mesh.stop()
    except Exception as error:  # a mesh that lost a process cannot stop in good order; the pids are looked after below
        print(f"stopping a mesh: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
