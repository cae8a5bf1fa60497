"""Snapshots of a state that a CPU computes with: it lives in the shared memory itself, and beside it a copy.

    update ─▶ take: it is stamped ─▶ all ranks have ended the step ─▶ settle: it is copied, beside the forward ─▶ update

Between two updates nothing changes, so the state is its own snapshot; the copy is what there is while it is updated,
and until all ranks have the next step. That is one copy less than where the state lives elsewhere.
"""

import torch

from titan_rl.mesh.channel.region import FAILED, WRITING
from titan_rl.mesh.freed_memory import give_back
from titan_rl.trainer.snapshot import Snapshots

_STATE, _COPY = 0, 1
"""Slots."""


class SnapshotsInPlace(Snapshots):
    """Made before anybody has a view of what is trained: that moves."""

    def __init__(self, rank: int, learner):
        super().__init__(rank, learner)
        self._move_in()
        give_back()  # what was moved has left its memory to nobody

    @torch.no_grad()
    def _move_in(self) -> None:
        """Whatever is not there: at first all, later what a checkpoint brought."""
        for held, place in self.layout.places(self.region.slots[_STATE]):
            if held.memory.data_ptr() != place.data_ptr():
                held.move(_by_itself(place))

    def take(self, step: int) -> None:
        self.writer.wait()
        self._forget_after(step)
        stamps = self.region.header.stamps
        stamps[_STATE] = WRITING
        if stamps[_COPY] == step:  # taken again, after the run went back, it is another one
            stamps[_COPY] = FAILED
        self._move_in()
        self._begin(step, _STATE)

    def settle(self) -> None:
        self.writer.wait()
        stamps = self.region.header.stamps
        if stamps[_STATE] >= 0 and stamps[_STATE] != stamps[_COPY]:
            self.writer.begin_again(_STATE, _COPY)

    def before_update(self) -> None:
        self.settle()
        self.writer.wait()
        self.region.header.stamps[_STATE] = WRITING


def _by_itself(place: torch.Tensor) -> torch.Tensor:
    """In a storage of its own over the same memory, since a checkpoint copies whole storages."""
    return torch.from_numpy(place.reshape(-1).view(torch.uint8).numpy()).view(place.dtype).view(place.shape)
