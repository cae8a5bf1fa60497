"""Bridge between the policy's ranks and those of a learned role with its own processes.

Either side is a process group of its own, in a layout of its own, and meets the other only here. What crosses are
small things: columns of tokens by sample, and requests.
"""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titan_rl.mesh.resources.rendezvous import store_at
from titan_rl.trainer.distributed.process_group import on_group_exit


class Bridge:
    """One rank's end of the bridge; all ranks of both sides call it together, in order."""

    def __init__(self, rank: int, world_size: int, policy_ranks: int, rendezvous: str, seconds: float):
        """``rank``: among all, of whom the first ``policy_ranks`` are the policy's. ``seconds``: as in ``join_group``.
        The process group must be up: whoever leaves it leaves here, too."""
        store = store_at(f"{rendezvous}.bridge", world_size, seconds)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))
        self.rank, self.world_size = rank, world_size
        self._others = slice(policy_ranks, None) if rank < policy_ranks else slice(policy_ranks)
        on_group_exit(self._group.shutdown)

    def exchange(self, message: Any) -> list[Any]:
        """Messages of all ranks of the other side, in rank order; anything that pickles."""
        mine = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        lengths = self._gathered(torch.tensor([len(mine)]), 1)
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyones = zip(self._gathered(padded, len(padded)), lengths, strict=True)
        return [pickle.loads(data[: int(length)].numpy().tobytes()) for data, length in list(everyones)[self._others]]

    def _gathered(self, mine: torch.Tensor, length: int) -> list[torch.Tensor]:
        everyones = [mine.new_empty(length) for _ in range(self.world_size)]
        # torch's stub leaves the method out
        self._group.allgather([everyones], [mine]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        return everyones
