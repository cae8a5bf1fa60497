"""Wiring of a run's actors, where actor classes, models and trainer settings meet."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from titan_rl.actors.classes import ACTORS
from titan_rl.algorithms.base import NO_NEEDS, Needs
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.evaluate import evaluate
from titan_rl.controller.loop.suites import evaluate_suites
from titan_rl.controller.planning.device_plan import plan_devices, this_machine
from titan_rl.controller.preflight.checks import Checked
from titan_rl.controller.preflight.device import is_on_cpu
from titan_rl.controller.preflight.host_checks import without_hosts
from titan_rl.mesh.meshes import ActorClasses, MeshCallbacks, Meshes, MeshOptions, ProcessPlacement, Ranks
from titan_rl.models.families.registry import Family
from titan_rl.models.spec import longest_rollout
from titan_rl.records.evaluations.results import SuiteResult
from titan_rl.records.statistics import Proportion
from titan_rl.trainer.roles.names import needed_roles, own_learned
from titan_rl.trainer.titan_config import TitanConfig, role_titan


def make_meshes(
    config: Config,
    titan: TitanConfig,
    model_path: str,
    *,
    actors: ActorClasses = ACTORS,
    family: Family | None = None,
    needs: Needs = NO_NEEDS,
    **options: Unpack[MeshOptions],
) -> Meshes:
    """Meshes of a run, not started. ``needs``: the algorithm's."""
    own = [role for role in needed_roles(needs) if getattr(config, role).placement == "own"]
    learned = own_learned(config, needs)
    return Meshes(
        config,
        model_path=model_path,
        ranks=Ranks(
            titan.world_size,
            own_roles={role: role_titan(config, role).world_size for role in own},
            learned_roles={learned: role_titan(config, learned).world_size} if learned else {},
        ),
        max_tokens=longest_rollout(titan.training.seq_len, model_path, family),
        on_cpu=is_on_cpu(config),
        actors=actors,
        **options,
    )


class Actors:
    """Some actors without a run: to evaluate a model, train recorded steps again, or look them over. An async context
    manager."""

    def __init__(
        self,
        checked: Checked,
        model_path: str,
        parts: frozenset[str],
        kept_policy: str = "",
        *,
        log: Callable[[str], None] = print,
        logs: Path | None = None,
    ):
        """``kept_policy``: where the run that they belong to keeps the policy (initial_policy.py). ``log`` takes
        deaths and repairs. ``logs``: a folder for what the processes print; without one it is kept only if something
        fails."""
        self.checked = checked = replace(checked, config=without_hosts(checked.config))
        machine, self._log = this_machine(), log
        self._own_logs = None if logs is not None else Path(tempfile.mkdtemp(prefix="titan_rl_logs_"))
        self.meshes = make_meshes(
            *(checked.config, checked.titan, model_path),
            family=checked.family,
            needs=checked.algorithm.needs,
            parts=parts,
            kept_policy=kept_policy,
            logs=logs or self._own_logs,
            callbacks=MeshCallbacks(log=log),
            placement=ProcessPlacement(
                launcher=checked.launcher,
                devices=plan_devices(checked, machine, parts).devices if machine is not None else None,
            ),
        )

    async def __aenter__(self) -> "Actors":
        try:
            await self.meshes.start()
        except BaseException as error:  # cancelled included: nobody else can stop what has started
            await self._end(error)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        await self.meshes.stop()
        if self._own_logs is None:
            return
        if isinstance(error, Exception):
            self._log(f"what the actors printed is in {self._own_logs}")
        else:
            shutil.rmtree(self._own_logs, ignore_errors=True)

    async def evaluate(self) -> Proportion:
        """Held-out accuracy of the model."""
        return await evaluate(self.meshes, self.checked.held_out, self.checked.config)

    async def evaluate_suites(self, record: Callable[[SuiteResult], None]) -> None:
        """Evaluate the model on ``eval.suites``. ``record`` takes each result as its suite ends."""
        await evaluate_suites(self.meshes, self.checked.suites, self.checked.config, record)
