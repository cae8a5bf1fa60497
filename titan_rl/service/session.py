"""A service as an object: checked, started, closed. Everything is wired here."""

import asyncio
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from titan_rl.actors.classes import SERVICE_ACTORS
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.config.model_directory.config_checks import VISION
from titan_rl.config.sections.schema import Config
from titan_rl.controller.initial_policy import base_model
from titan_rl.controller.planning.device_report import fit_and_place
from titan_rl.controller.preflight.checks import Checked, check, read_config
from titan_rl.controller.wiring import make_meshes
from titan_rl.mesh.meshes import MeshCallbacks, ProcessPlacement
from titan_rl.mesh.supervision.actor_process import ActorFault
from titan_rl.records.run_directory.events import EventLog
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.service.adapters.serving import ServedWeights
from titan_rl.service.adapters.training import AdapterTraining
from titan_rl.service.service import ServedModel, Service

_PARTS = frozenset({"trainer", "generators"})


class ServiceSession:
    """A service. ``close`` must follow ``open``."""

    def __init__(self, checked: Checked, run_dir: RunDir, name: str, devices: Any) -> None:
        self._run_dir = run_dir
        self.events = EventLog(run_dir.root)
        self.fault = ""
        """Why the service must end, once it must."""
        self.on_fault: Callable[[], None] = lambda: None
        self._watching: asyncio.Task[None] | None = None
        config, titan = checked.config, checked.titan
        path = base_model(config, run_dir)
        self._meshes = make_meshes(
            *(config, titan, path),
            actors=SERVICE_ACTORS,
            family=checked.family,
            parts=_PARTS,
            logs=run_dir.logs.absolute(),
            catch_up=self._catch_up,
            callbacks=MeshCallbacks(
                log=self.log, record_event=self._record_event, on_lost=self._lost, on_fault=self._lost
            ),
            placement=ProcessPlacement(launcher=checked.launcher, devices=devices),
        )
        self._training = AdapterTraining(self._meshes, config, titan.layout, (run_dir.root / "adapters").absolute())
        self._weights = ServedWeights(self._meshes, self._training)
        self.model = ServedModel(
            name or Path(path).name,
            str(Path(path).absolute()),
            rank=config.lora.rank,
            vocabulary=read_config(checked).vocab_size,
            max_tokens=self._meshes.max_tokens,
            seed=config.run.seed,
        )
        self.service = Service(self.model, self._training, self._weights, run_dir.root, self._failed)

    @classmethod
    def open(cls, config: Config, name: str | None, *, checks: Collection[str]) -> "ServiceSession":
        """Check everything and take the directory. ``checks``: names of those that apply. Errors: ConfigError."""
        checked = check(config, (), only=checks)
        if read_config(checked).model_type in VISION:
            raise ConfigError(f"model.path = {config.model.path!r} sees images, and serve passes on text alone")
        fitting, plan, lines = fit_and_place(checked, under_torchrun=False)
        root = Path(config.run.dir) if config.run.dir else Path("runs", time.strftime("serve-%Y%m%d-%H%M%S"))
        run_dir = RunDir(root)
        if run_dir.config.exists() and not (root / "adapters").is_dir():
            raise ConfigError(f"{root} holds a run: give a new --run.dir, or that of an earlier service")
        run_dir.open(checked.as_dict())
        (root / "adapters").mkdir(exist_ok=True)
        session = cls(fitting, run_dir, name or "", None if plan is None else plan.devices)
        for line in lines:
            session.log(line)
        return session

    async def _catch_up(self, trainers: Any, step: int | None) -> int:
        return await self._training.catch_up(trainers, step)

    async def start(self) -> None:
        """Start all actors."""
        begun = time.perf_counter()
        self.log(f"directory {self._run_dir.root}")
        await self._meshes.start()
        await self._weights.start()
        self._watching = asyncio.create_task(self.service.watch())
        seconds = time.perf_counter() - begun
        self.log(f"actors up after {seconds:.1f} s, weights by {self._meshes.weights.transports}")

    async def close(self) -> None:
        """End all requests and processes."""
        if self._watching is not None:
            self._watching.cancel()
        await self.service.stop()
        await self._meshes.stop()
        self.events.close()
        self._run_dir.close()

    def log(self, line: str) -> None:
        """To standard error, and to the directory's log."""
        say(line, sys.stderr)
        with open(self._run_dir.log, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _record_event(self, kind: str, **fields: Any) -> None:
        self.events.write(kind, **fields)
        self._run_dir.write_pids(self._meshes.pids)

    def _failed(self, line: str, error: Exception) -> None:
        self.log(line)
        if isinstance(error, ActorFault):
            self._lost(error)

    def _lost(self, fault: str | Exception) -> None:
        if self.fault:
            return
        self.fault = why = str(fault)
        self.log(f"the service ends: {why}")
        self.on_fault()
