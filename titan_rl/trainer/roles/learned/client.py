"""Client of a learned role in its own processes (worker.py), with the interface of a local one.

    find ─▶ columns of tokens          begin ─▶ it learns while the policy's gradients are made
                                       learn ─▶ both apply their updates, or, if either cannot, neither does

Rows are not sent: the role has pulled them itself. Columns are keyed by the samples of a row.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Row
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.roles.learned.bridge import Bridge
from titan_rl.trainer.roles.learned.role import LearnedRole, LearnedRoleInterface, RoleResult, RoleState

Samples = tuple[int, tuple[tuple[str, int, int], ...]]
"""Key of a row, unique in a step: checksum of its targets, and its owners."""
Columns = dict[str, np.ndarray]


def samples_of(row: Row) -> Samples:
    return zlib.crc32(row.target_S.tobytes()), tuple(row.owners)


class LearnedRoleClient(LearnedRoleInterface):
    """Stateless client of a learned role in its own processes."""

    def __init__(self, config: Config, role: type[LearnedRole], bridge: Bridge, *, reports: bool):
        """``reports``: true on one rank of each set that shares its rows, with the policy's head."""
        self.name, self.columns, self.settings = role.name, role.columns, getattr(config, role.name)
        self.bridge, self.reports = bridge, reports
        self._is_learning = False

    def _request(self, request: str, rows: list[Row] | None = None) -> list[Any]:
        """Replies of all ranks of the role."""
        self._send(request, rows)
        return self.bridge.exchange(None)

    def _send(self, request: str, rows: list[Row] | None = None) -> None:
        columns = {samples_of(row): self._columns_of(row) for row in rows or () if self.reports and row.owners}
        self.bridge.exchange((request, columns))

    def _columns_of(self, row: Row) -> Columns:
        return {name: row.role_columns[name] for name in self.columns if name in row.role_columns}

    @property
    def is_warming_up(self) -> bool:
        return self._request("is_warming_up")[0]

    @property
    def learns_first(self) -> bool:
        return self._request("learns_first")[0]

    def end_step(self) -> None:
        self._request("end_step")

    def find(self, rows: list[Row]) -> list[Columns]:
        columns: dict[Samples, Columns] = {}
        for reply in self._request("find", rows):
            columns |= reply
        return [columns.get(samples_of(row), {}) for row in rows]

    def zero_columns(self, num_tokens: int) -> Columns:
        return {name: np.zeros(num_tokens, np.float32) for name in self.columns}

    def begin(self, rows: list[Row]) -> None:
        self._send("learn", rows)
        self._is_learning = True

    def learn(self, rows: list[Row]) -> RoleResult:
        if not self._is_learning:
            self.begin(rows)
        return self._exchange_verdict(is_fine=True)

    def forget(self) -> None:
        self._exchange_verdict(is_fine=False)

    def _exchange_verdict(self, *, is_fine: bool) -> RoleResult:
        self._is_learning = False
        return self.bridge.exchange(is_fine)[0]

    def saved_state(self) -> RoleState:
        """Empty state: the role's own ranks hold it."""
        self._request("save")
        return RoleState([], {})

    def restore(self, state: RoleState) -> None:
        self._request("restore")

    def init_from(self, policy: ShardedModel) -> None:
        """No-op: the role loads the saved initial policy (controller/initial_policy.py)."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Empty: the role's weights are in its own processes."""
        return iter(())
