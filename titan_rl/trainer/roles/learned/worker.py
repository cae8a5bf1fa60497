"""Rank of a learned role with its own processes, which takes part in every step.

It is a trainer rank like the policy's: it pulls the step's rows itself, has snapshots and checkpoints (in a folder of
its own), and is replaced the same way. The policy's ranks send it requests (client.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import Config
from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.spans import Spans
from titan_rl.data.types import Row, StepMetrics
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.trainer.distributed.ranks import is_first_of_rows, parallel_dims
from titan_rl.trainer.model.sharded_model import make_sharded
from titan_rl.trainer.objective.preparation import RowColumns
from titan_rl.trainer.rank_interface import LearningModel, T, TrainerRank
from titan_rl.trainer.roles.frozen_worker import dealt
from titan_rl.trainer.roles.learned.bridge import Bridge
from titan_rl.trainer.roles.learned.client import Columns, Samples, samples_of
from titan_rl.trainer.roles.learned.registry import LEARNED_ROLES
from titan_rl.trainer.roles.learned.role import LearnedRole, RoleResult, RoleState
from titan_rl.trainer.roles.names import learned_role, role_paths
from titan_rl.trainer.state.checkpoint_state import load_random, load_role, random_states, role_folder, role_state
from titan_rl.trainer.titan_config import TitanConfig


class LearnedRoleWorker(TrainerRank):
    """Rank of a learned role; its process group must be up."""

    def __init__(self, config: Config, titan: TitanConfig, model_path: str, initial_policy: str, bridge: Bridge):
        """``titan``: with the role's own layout. ``initial_policy``: as in ``names.role_paths``."""
        self.titan, self.bridge, self.spans = titan, bridge, Spans()
        self.device = device.local_device(bridge.rank)
        self.before_update: Callable[[], None] = lambda: None
        name = learned_role(config, make_algorithm(config.algorithm, config.run.plugin_path).needs)
        assert name is not None, "an algorithm without a role that learns"
        kind = LEARNED_ROLES[name]
        [self.path] = role_paths(config, name, model_path, initial_policy)
        dims = parallel_dims(titan.parallelism)
        model = make_sharded(config, titan, dims, self.device, self.path, head=kind.head)
        self.role: LearnedRole = kind(config, titan, model, dims, lambda: self.before_update())
        self.step_values = []
        self._reports = is_first_of_rows(dims) and (model.pipeline is None or model.pipeline.has_last)
        self._rows: dict[Samples, Row] = {}
        """All rows of the current step, of every rank of the policy."""
        self._saved: RoleState | None = None

    # the steps of a run

    def share(self, groups: Sequence[T]) -> Sequence[T]:
        return groups

    def train_step(
        self, batches: list[list[Row]], has_signal: list[bool], role_columns: Sequence[RowColumns] = ()
    ) -> list[StepMetrics | NonfiniteBatch]:
        """Serve requests of the policy's ranks until the step ends; ``batches``: all rows of each update."""
        self._rows = {samples_of(row): row for rows in batches for row in rows if row.owners}
        request = ""
        while request != "end_step":
            request, columns = self._receive()
            if request == "learn":
                with self.spans.span("learn"):
                    self.role.learn(self._mine(columns), self._approves)
            else:
                self.bridge.exchange(self._answer(request, columns))
        return []

    def _receive(self) -> tuple[str, dict[Samples, Columns]]:
        """Request of the policy's ranks, and their columns of the rows."""
        requests = self.bridge.exchange(None)
        columns: dict[Samples, Columns] = {}
        for _, row_columns in requests:
            columns |= row_columns
        return requests[0][0], columns

    def _answer(self, request: str, columns: dict[Samples, Columns]) -> Any:
        if request == "find":
            with self.spans.span("find"):
                return self._find(columns)
        if request == "save":
            self._saved = self.role.saved_state()
        elif request == "restore":
            assert self._saved is not None, "no state was saved"
            self.role.restore(self._saved)
        elif request == "is_warming_up":
            return self.role.is_warming_up
        elif request == "learns_first":
            return self.role.learns_first
        elif request == "end_step":
            self._saved = None
        return None

    def _mine(self, columns: dict[Samples, Columns]) -> list[Row]:
        """This rank's part of these rows, as the role needs them."""
        mine = dealt(list(columns.items()), self.titan.batch_rank(dist.get_rank()), self.titan.batch_degree)
        pairs = [(self._rows[samples], row_columns) for samples, row_columns in mine]
        rows = [replace(row, role_columns=row.role_columns | row_columns) for row, row_columns in pairs]
        idle = [dummy_row() for _ in range(-(-len(columns) // self.titan.batch_degree) - len(rows))]  # as many passes
        return self.role.completed(rows + idle)

    def _find(self, row_columns: dict[Samples, Columns]) -> dict[Samples, Columns]:
        rows = self._mine(row_columns)
        outputs = zip(rows, self.role.find(rows), strict=True)
        return {samples_of(row): columns for row, columns in outputs if self._reports and row.owners}

    def _approves(self, result: RoleResult) -> bool:
        """Whether the policy can apply the batch."""
        return all(self.bridge.exchange(result))

    def sft(self, batches: list[list[Row]], lr: float, num_steps: int = 0) -> list[float]:
        """Empty: supervised steps train the policy alone."""
        return []

    # state

    @property
    def roles(self) -> dict[str, LearnedRole]:
        return {self.role.name: self.role}

    def learning(self) -> dict[str, LearningModel]:
        return {self.role.name: self.role}

    def weights_changed(self) -> None:
        """No-op: a role keeps no copies of its weights."""

    def digests(self) -> dict[str, str]:
        return {}

    def state(self) -> dict[str, Any]:
        return role_state(self.role.name, self.role) | random_states()

    @property
    def part(self) -> str:
        return self.role.name

    def load_checkpoint(self, checkpoint: Path) -> None:
        self.before_update()
        if not load_role(self.role.name, self.role, checkpoint):
            self.role.model.load(self.path)
        load_random(role_folder(checkpoint, self.role.name))

    def save_hf(
        self,
        out: str | Path,
        adapter: str | Path = "",
        beside: str | Path = "",
        dtype: str = "auto",
        quantizer: Quantizer | None = None,
    ) -> None:
        """Write the role into ``beside``; the policy's ranks write the rest."""
        if beside:
            self.role.model.save(Path(beside) / self.role.name, dtype)
