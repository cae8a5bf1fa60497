"""Rank of a frozen role with its own processes and layout.

The trainer's rows are dealt out anew among the role's groups of ranks, and their columns go back by place.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import Config
from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.types import TASK_COLUMN, Row
from titan_rl.trainer.distributed.ranks import is_first_of_rows, parallel_dims
from titan_rl.trainer.model.sharded_model import make_sharded
from titan_rl.trainer.objective.preparation import RowColumns, with_role_columns
from titan_rl.trainer.roles.frozen import make_roles
from titan_rl.trainer.roles.names import role_paths
from titan_rl.trainer.titan_config import TitanConfig

T = TypeVar("T")


def dealt(rows: Sequence[T], part: int, num_parts: int) -> list[T]:
    """Every ``num_parts``-th row from number ``part`` on."""
    return list(rows[part::num_parts])


def _task_of(row: Row) -> int:
    """Task of a row's first token; -1 without."""
    return int(row.role_columns.get(TASK_COLUMN, [-1])[0])


class FrozenRoleWorker:
    """Rank of a frozen role's models; its process group must be up."""

    def __init__(self, config: Config, titan: TitanConfig, role: str, model_path: str, initial_policy: str):
        self.titan = titan
        dims = parallel_dims(titan.parallelism)
        sharded = partial(make_sharded, config, titan, dims, device.local_device(dist.get_rank()))
        needs = make_algorithm(config.algorithm, config.run.plugin_path).needs
        paths = role_paths(config, role, model_path, initial_policy)
        self.roles = make_roles(config, needs, role, paths, sharded)
        self.model = next(iter(self.roles.values())).model
        """The first, whose layout is that of all."""
        self._reports = is_first_of_rows(dims) and (self.model.pipeline is None or self.model.pipeline.has_last)

    def find(self, groups: list[list[list[Row]]]) -> list[list[RowColumns]] | None:
        """Columns of this rank's share of rows, for each group of trainer ranks.

        ``groups[group][update]``: rows of an update. Returns None on a rank whose peer reports them."""
        places = [
            (group, (update, number), row)
            for group, updates in enumerate(groups)
            for update, rows in enumerate(updates)
            for number, row in enumerate(rows)
        ]
        places.sort(key=lambda place: _task_of(place[2]))  # ranks that pass a row of one teacher at once pass no other
        part, degree = self.titan.batch_rank(dist.get_rank()), self.titan.batch_degree
        mine = dealt(places, part, degree)
        idle = [dummy_row() for _ in range(-(-len(places) // degree) - len(mine))]  # all must make as many passes
        rows = self.model.fit([row for _, _, row in mine] + idle)
        found = with_role_columns(rows, [role.find for role in self.roles.values()])
        if not self._reports:
            return None
        by_group: list[list[RowColumns]] = [[] for _ in groups]
        for (group, place, row), with_columns in zip(mine, found, strict=False):
            columns = {name: its for name, its in with_columns.role_columns.items() if name not in row.role_columns}
            by_group[group].append((place, columns))
        return by_group

    def load(self, path: str) -> None:
        """Load other weights into the role's only model."""
        self.model.load(path)

    def digests(self) -> dict[str, str]:
        return {name: role.model.digest() for name, role in self.roles.items()}
