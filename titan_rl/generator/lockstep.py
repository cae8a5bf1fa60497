"""The ranks of a tensor-parallel engine run the same commands in the same order: rank 0 decides, the others follow."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
HEARTBEAT_SECONDS = 5.0
"""Rank 0 sends at least this often. A rank that receives nothing for much longer gives up."""
_TIMEOUT = timedelta(seconds=12 * HEARTBEAT_SECONDS)


@dataclass(frozen=True)
class Command:
    """Method of the engine with arguments, which all ranks run between two steps."""

    name: str
    arguments: tuple[Any, ...] = ()


class Lockstep:
    """The process group must be initialized; all ranks construct it together."""

    def __init__(self, num_ranks: int):
        self._group: dist.ProcessGroup | None = None
        if num_ranks > 1:
            group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup), "every rank is of it"
            self._group = group
        self.is_leader = self._group is None or dist.get_rank(self._group) == 0

    def share(self, commands: list[Command]) -> None:
        """Broadcast commands from rank 0."""
        if self._group is None:
            return
        data = pickle.dumps(commands) if commands else b""
        dist.broadcast(torch.tensor([len(data)]), 0, self._group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, self._group)

    def receive(self) -> list[Command]:
        """Commands of rank 0. Errors: RuntimeError if it is gone or silent."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, self._group)
        if not int(size):
            return []
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, self._group)
        return pickle.loads(data.numpy().tobytes())

    def together(self, run: Callable[[], T]) -> T:
        """Run a function on every rank. Errors: its own; RuntimeError if it failed on another rank."""
        try:
            result = run()
        except Exception:  # the other ranks wait for the result, so they must learn of any error
            self._any_failed(True)
            raise
        if self._any_failed(False):
            raise RuntimeError("another rank of this engine failed")
        return result

    def _any_failed(self, is_failed: bool) -> bool:
        """Whether it failed on any rank; all ranks ask."""
        if self._group is None:
            return is_failed
        failed = torch.tensor([int(is_failed)])
        dist.all_reduce(failed, group=self._group)
        return bool(failed)
