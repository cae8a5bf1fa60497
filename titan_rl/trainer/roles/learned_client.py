"""The policy's side of a role that learns in processes of its own (learned_worker.py): asked as if it were here.

    find ─▶ columns of tokens          begin ─▶ it learns while the policy's gradients are made
                                       learn ─▶ both apply their updates, or, if either cannot, neither does

Rows do not cross: the role has pulled them itself. What is said of them goes by the samples that they hold.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Row
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.roles.bridge import Bridge
from titan_rl.trainer.roles.learned_role import Kept, LearnedRole, Taught, Told

Samples = tuple[int, tuple[tuple[str, int, int], ...]]
"""Whose a row is, and of what: no other row of a step has the same, also if one sample's branches are in several."""
Columns = dict[str, np.ndarray]


def samples_of(row: Row) -> Samples:
    return zlib.crc32(row.target_S.tobytes()), tuple(row.owners)


class LearnedElsewhere(Taught):
    """What a LearnedRole is to the steps of a run; it holds no state."""

    def __init__(self, config: Config, role: type[LearnedRole], bridge: Bridge, *, speaks: bool):
        """``speaks``: of ranks that have the same rows one must, which sees what was found of them."""
        self.name, self.columns, self.settings = role.name, role.columns, getattr(config, role.name)
        self.bridge, self.speaks = bridge, speaks
        self._is_learning = False

    def _ask(self, what: str, rows: list[Row] | None = None) -> list[Any]:
        """What each of the role's ranks answers."""
        self._say(what, rows)
        return self.bridge.exchange(None)

    def _say(self, what: str, rows: list[Row] | None = None) -> None:
        said = {samples_of(row): self._known(row) for row in rows or () if self.speaks and row.owners}
        self.bridge.exchange((what, said))

    def _known(self, row: Row) -> Columns:
        return {name: row.found[name] for name in self.columns if name in row.found}

    @property
    def learns_alone(self) -> bool:
        return self._ask("learns_alone")[0]

    @property
    def learns_first(self) -> bool:
        return self._ask("learns_first")[0]

    def end_step(self) -> None:
        self._ask("end_step")

    def find(self, rows: list[Row]) -> list[Columns]:
        found: dict[Samples, Columns] = {}
        for told in self._ask("find", rows):
            found |= told
        return [found.get(samples_of(row), {}) for row in rows]

    def nothing_found(self, num_tokens: int) -> Columns:
        return {name: np.zeros(num_tokens, np.float32) for name in self.columns}

    def begin(self, rows: list[Row]) -> None:
        self._say("learn", rows)
        self._is_learning = True

    def learn(self, rows: list[Row]) -> Told:
        if not self._is_learning:
            self.begin(rows)
        return self._agree(is_fine=True)

    def forget(self) -> None:
        self._agree(is_fine=False)

    def _agree(self, *, is_fine: bool) -> Told:
        self._is_learning = False
        return self.bridge.exchange(is_fine)[0]

    def kept(self) -> Kept:
        """Nothing: its own ranks keep it."""
        self._ask("keep")
        return Kept([], {})

    def put_back(self, kept: Kept) -> None:
        self._ask("put_back")

    def begin_as(self, policy: ShardedModel) -> None:
        """It takes the policy from where the run keeps it (controller/initial_policy.py)."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None of its weights is here."""
        return iter(())
