"""Snapshots: copies of a GPU's state, or a CPU's state itself in shared memory with one copy.

A GPU's state is copied after a step, beside the next forward. A CPU computes with the shared memory itself:

    update ─▶ take: it is stamped ─▶ all ranks have ended the step ─▶ forward, backward ─▶ it is copied ─▶ update

Between two updates nothing changes, so the state is its own snapshot; the copy is what there is while it is updated,
and until all ranks have the next step. That is one copy less than where the state lives elsewhere. Where memory is
spared there is no copy: a rank that dies in the few hundredths of a step that an update and its checksums take sends
the run back to its newest checkpoint, and steps are trained again.
"""

from typing import TYPE_CHECKING

import torch

from titan_rl.algorithms.base import Needs
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.sections.schema import Config
from titan_rl.mesh.channel.memory.region import FAILED, NUM_SLOTS, WRITING
from titan_rl.mesh.resources.released_memory import give_back
from titan_rl.trainer.memory.parameter_memory import trained_tensors
from titan_rl.trainer.state.snapshot import Layout, Snapshots

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import TrainerRank


class CopiedSnapshots(Snapshots):
    """Snapshots as two copies; the older is overwritten."""

    def take(self, step: int) -> None:
        self.writer.wait()
        self._forget_after(step)
        stamps = self.region.header.stamps
        slot = next((s for s in range(NUM_SLOTS) if stamps[s] == step), int(stamps.argmin()))
        # made anew each time: loading a checkpoint replaces the moments' tensors
        places = self.layout.places(self.region.slots[slot])
        self.writer.copies[slot] = [(place, tensor.memory) for tensor, place in places]
        self._begin(step, slot)

    def offload(self) -> None:
        self.writer.wait()  # for moments are about to move
        self.writer.copies = [[] for _ in range(NUM_SLOTS)]

    def settle(self) -> None:
        """The step before it is still there."""

    def before_update(self) -> None:
        self.writer.wait_until_copied()


_STATE, _COPY = 0, 1
"""Slots."""


class SnapshotsInPlace(Snapshots):
    """Snapshots as the state itself and, unless memory is spared, one copy.

    Created before any view of the parameters, since these move."""

    def __init__(self, rank: int, learner: "TrainerRank", spares_memory: bool = False):
        super().__init__(rank, learner)
        self._spares_memory = spares_memory
        self._move_in()
        give_back()  # what was moved has left its memory to nobody

    @torch.no_grad()
    def _move_in(self) -> None:
        """Whatever is not there: at first all, later what a checkpoint brought."""
        for tensor, place in self.layout.places(self.region.slots[_STATE]):
            if tensor.memory.data_ptr() != place.data_ptr():
                tensor.move(_by_itself(place))

    def take(self, step: int) -> None:
        self.writer.wait()
        self._forget_after(step)
        stamps = self.region.header.stamps
        if stamps[_STATE] != step:  # a step without an update leaves that before it here, where other ranks may be
            self._copy()
        stamps[_STATE] = WRITING
        if stamps[_COPY] == step:  # taken again, after the run went back, it is another one
            stamps[_COPY] = FAILED
        self._move_in()
        self._begin(step, _STATE)

    def offload(self) -> None:
        """Nothing moves."""

    def settle(self) -> None:
        self.writer.wait()

    def before_update(self) -> None:
        self.writer.wait()
        self._copy()
        self.region.header.stamps[_STATE] = WRITING

    def _copy(self) -> None:
        """If there is to be one, the state is whole, and it is not there yet."""
        stamps = self.region.header.stamps
        if not self._spares_memory and stamps[_STATE] >= 0 and stamps[_STATE] != stamps[_COPY]:
            self.writer.copy_slot(_STATE, _COPY)


def _by_itself(place: torch.Tensor) -> torch.Tensor:
    """In a storage of its own over the same memory, since a checkpoint copies whole storages."""
    return torch.from_numpy(place.reshape(-1).view(torch.uint8).numpy()).view(place.dtype).view(place.shape)


def spares_memory(config: Config, needs: Needs) -> bool:
    """Whether a CPU rank does without the copy (``SnapshotsInPlace``): if there is one update from a snapshot to the
    next, checkpoints to fall back to, and one host, since what another host copies is late."""
    has_role = needs.critic or needs.implicit_reward or config.drafter.learns
    has_one_update = config.algorithm.updates_per_batch == 1 and not has_role
    is_each_kept = has_one_update and config.recovery.snapshot_every == 1
    return is_each_kept and bool(config.checkpoint.every) and not config.hosts.is_on


def make_snapshots(rank: int, learner: "TrainerRank", config: Config, before: Snapshots | None = None) -> Snapshots:
    """Snapshots of a trainer rank, created before any view of its parameters, which may move.

    ``before``: of this rank's learner before. Copies go on in its memory, where what it took is still to be read until
    these are opened: on a GPU's host it is as much as the state twice over, and takes long to pin.
    """
    if learner.device.type == "cpu" and not learner.has_views:
        algorithm = make_algorithm(config.algorithm, config.run.plugin_path, on_data=bool(config.data.file))
        return SnapshotsInPlace(rank, learner, spares_memory(config, algorithm.needs))
    size = Layout(trained_tensors(learner)).size
    if isinstance(before, CopiedSnapshots) and (before.region.slot_bytes, before.region.blocks) == size:
        return CopiedSnapshots(rank, learner, before.region)
    return CopiedSnapshots(rank, learner)
