"""Snapshots of a state that a CPU computes with: it lives in the shared memory itself, and beside it a copy.

    update ─▶ take: it is stamped ─▶ all ranks have ended the step ─▶ settle: it is copied, beside the forward ─▶ update

Between two updates nothing changes, so the state is its own snapshot; the copy is what there is while it is updated,
and until all ranks have the next step. That is one copy less than where the state lives elsewhere.

    update ─▶ take ─▶ settle: the copy is given up ─▶ forward, backward ─▶ what they took is given up ─▶ copy ─▶ update

That one copies late: no moment holds both the copy and what a forward and a backward take. It costs some time, unless
that memory is given back in each step anyway.
"""

import torch

from titan_rl.mesh.channel.region import FAILED, WRITING
from titan_rl.mesh.freed_memory import drop_shared_contents, give_back
from titan_rl.trainer.snapshot import Snapshots

_STATE, _COPY = 0, 1
"""Slots."""


class SnapshotsInPlace(Snapshots):
    """Made before anybody has a view of what is trained: that moves."""

    def __init__(self, rank: int, learner, copies_late: bool = False):
        super().__init__(rank, learner)
        self._copies_late = copies_late
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
        self._copy_if_it_has_to_be()
        stamps = self.region.header.stamps
        stamps[_STATE] = WRITING
        if stamps[_COPY] == step:  # taken again, after the run went back, it is another one
            stamps[_COPY] = FAILED
        self._move_in()
        self._begin(step, _STATE)

    def settle(self) -> None:
        self.writer.wait()
        if self._copies_late and self.region.header.stamps[_STATE] >= 0:
            self.region.header.stamps[_COPY] = FAILED
            drop_shared_contents(self.region.slots[_COPY])
        elif self._is_without_copy:
            self.writer.begin_again(_STATE, _COPY)

    def before_update(self) -> None:
        self.writer.wait()
        self._copy_if_it_has_to_be()
        self.region.header.stamps[_STATE] = WRITING

    @property
    def _is_without_copy(self) -> bool:
        stamps = self.region.header.stamps
        return stamps[_STATE] >= 0 and stamps[_STATE] != stamps[_COPY]

    def _copy_if_it_has_to_be(self) -> None:
        if self._is_without_copy:
            if self._copies_late:
                give_back()
            self.writer.fill_again(_STATE, _COPY)


def _by_itself(place: torch.Tensor) -> torch.Tensor:
    """In a storage of its own over the same memory, since a checkpoint copies whole storages."""
    return torch.from_numpy(place.reshape(-1).view(torch.uint8).numpy()).view(place.dtype).view(place.shape)
