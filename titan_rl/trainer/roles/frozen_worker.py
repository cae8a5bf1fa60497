"""Rank of a frozen role with its own processes and layout.

The trainer's rows are dealt out anew among the role's groups of ranks, and their columns go back by place.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import Config
from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.types import Row
from titan_rl.trainer.distributed.ranks import is_first_of_rows, parallel_dims
from titan_rl.trainer.model.sharded_model import make_sharded
from titan_rl.trainer.objective.preparation import RowColumns
from titan_rl.trainer.roles.frozen import FrozenRole
from titan_rl.trainer.roles.names import FROZEN, num_words, role_path
from titan_rl.trainer.titan_config import TitanConfig

T = TypeVar("T")


def dealt(rows: Sequence[T], part: int, num_parts: int) -> list[T]:
    """Every ``num_parts``-th row from number ``part`` on."""
    return list(rows[part::num_parts])


class FrozenRoleWorker:
    """Rank of a frozen role; its process group must be up."""

    def __init__(self, config: Config, titan: TitanConfig, role: str, model_path: str, initial_policy: str):
        self.titan = titan
        path = role_path(config, role, model_path, initial_policy)
        local = device.local_device(dist.get_rank())
        dims = parallel_dims(titan.parallelism)
        self.model = make_sharded(config, titan, dims, local, path)
        needs = make_algorithm(config.algorithm, config.run.plugin_path).needs
        self.role = FrozenRole(FROZEN[role], self.model, num_words(role, needs))
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
        part, degree = self.titan.batch_rank(dist.get_rank()), self.titan.batch_degree
        mine = dealt(places, part, degree)
        idle = [dummy_row() for _ in range(-(-len(places) // degree) - len(mine))]  # all must make as many passes
        columns_of_rows = self.role.find(self.model.fit([row for _, _, row in mine] + idle))
        if not self._reports:
            return None
        by_group: list[list[RowColumns]] = [[] for _ in groups]
        for (group, place, _), columns in zip(mine, columns_of_rows, strict=False):
            by_group[group].append((place, columns))
        return by_group

    def load(self, path: str) -> None:
        self.model.load(path)

    def digest(self) -> str:
        return self.model.digest()
