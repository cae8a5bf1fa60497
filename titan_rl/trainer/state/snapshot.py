"""Snapshots of a trainer rank: its state in shared memory, which outlives the process.

When a rank dies, the one that takes its place loads what was kept and the survivors load their own snapshots, so all go
on from one step. Two steps are there: a rank may die in the middle of an update or of a copy, and all ranks need one
common step. How the state gets there depends on where it is computed with (snapshot_kinds.py).
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titan_rl.mesh.channel.memory.region import FAILED, NUM_SLOTS, Region
from titan_rl.mesh.channel.memory.slots import SlotWriter
from titan_rl.mesh.channel.memory.streams import stream_for
from titan_rl.mesh.channel.plan import BLOCK_BYTES
from titan_rl.trainer.memory.parameter_memory import TrainedTensor, trained_tensors
from titan_rl.trainer.model.optimizer import load_schedule
from titan_rl.trainer.state.checkpoint_state import random_state, set_random_state

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import TrainerRank

_SMALL_BYTES = 256 << 10
"""Room for everything but weights and moments: random states, schedule, counts."""
_NICE = 10
"""Snapshots are copied beside weights that generators wait for, and beside what they generate."""
_CPU = torch.device("cpu")


class Layout:
    """Layout of a slot: random states and counts, then parameters and moments."""

    def __init__(self, tensors: list[TrainedTensor]):
        self.held, self._offsets, self.nbytes = tensors, [], _SMALL_BYTES
        for tensor in tensors:
            self._offsets.append(self.nbytes)
            self.nbytes += -(-tensor.memory.nbytes // 64) * 64

    @property
    def size(self) -> tuple[int, list[tuple[int, int]]]:
        """Bytes of a slot, and [start, stop) of each block that has a checksum."""
        starts = range(0, self.nbytes, BLOCK_BYTES)
        return self.nbytes, [(start, min(start + BLOCK_BYTES, self.nbytes)) for start in starts]

    def places(self, slot: torch.Tensor) -> Iterator[tuple[TrainedTensor, torch.Tensor]]:
        """Tensors with values on this rank, and their places in a slot, of the same shape and dtype."""
        for tensor, offset in zip(self.held, self._offsets, strict=True):
            if (memory := tensor.memory).nbytes:
                yield tensor, slot[offset : offset + memory.nbytes].view(memory.dtype).view(memory.shape)


class Snapshots(ABC):
    """Snapshots of one rank."""

    def __init__(self, rank: int, learner: "TrainerRank", region: Region | None = None):
        """``region``: one of this rank and layout that is there already, with what is in it."""
        self._learner: TrainerRank | None = learner
        self._layout: Layout | None = Layout(trained_tensors(learner))
        self.region = region or Region(rank, *self.layout.size, _CPU, filled_from=learner.device)
        self.writer = SlotWriter(self.region, [[] for _ in range(NUM_SLOTS)], stream_for(learner.device), nice=_NICE)

    @property
    def learner(self) -> "TrainerRank":
        """Learner whose state is copied, until ``let_go``."""
        assert self._learner is not None, "no snapshot is taken once the learner was let go of"
        return self._learner

    @property
    def layout(self) -> Layout:
        """The layout of a slot, until ``let_go``."""
        assert self._layout is not None, "no snapshot is taken once the learner was let go of"
        return self._layout

    def open(self) -> None:
        """Start taking snapshots; earlier ones become invalid."""
        self.region.header.stamps[:] = FAILED

    @abstractmethod
    def take(self, step: int) -> None:
        """Begin a snapshot of the state after ``step``."""

    @abstractmethod
    def settle(self) -> None:
        """Mark the last snapshot's step as ended on all ranks."""

    @abstractmethod
    def before_update(self) -> None:
        """Prepare for a change of the parameters; the last snapshot was begun in an earlier call of all ranks."""

    @abstractmethod
    def offload(self) -> None:
        """Prepare for the generators' turn; all ranks have ended the step."""

    def let_go(self) -> None:
        """Release the learner; existing snapshots can still be loaded."""
        self.writer.wait()
        self.writer.copies = [[] for _ in range(NUM_SLOTS)]
        self._learner = self._layout = None

    def steps(self) -> list[int]:
        """Steps with a complete snapshot."""
        self.writer.wait()
        return sorted({int(stamp) for stamp in self.region.header.stamps if stamp >= 0})

    def slot_of(self, step: int) -> torch.Tensor:
        return self.region.slots[[int(stamp) for stamp in self.region.header.stamps].index(step)]

    def _forget_after(self, step: int) -> None:
        """The run went back, and will take those steps again."""
        stamps = self.region.header.stamps
        stamps[stamps > step] = FAILED

    def _begin(self, step: int, slot: int) -> None:
        """Fill a slot with the state that is here now."""
        into, small = self.region.slots[slot], pickle.dumps(_small(self.learner))
        if len(small) + 8 > _SMALL_BYTES:
            raise ValueError(f"a rank's random and schedule states take {len(small)} bytes, more than {_SMALL_BYTES}")

        def write_small() -> None:
            into[:8] = torch.tensor([len(small)]).view(torch.uint8)
            into[8 : 8 + len(small)] = torch.frombuffer(bytearray(small), dtype=torch.uint8)

        self.writer.begin(step, slot, write_small)


def _small(learner: "TrainerRank") -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "random": random_state(),
        "schedulers": {role: scheduler.state_dict() for role, scheduler in learner.schedulers().items()},
        "counts": torch.stack(_counts(learner)).tolist(),  # on a GPU as well they are looked at once
    }


def _counts(learner: "TrainerRank") -> list[torch.Tensor]:
    """Updates of each parameter."""
    return [
        optimizer.state[p]["step"]
        for optimizer in learner.optimizers()
        for group in optimizer.param_groups
        for p in group["params"]
    ]


@torch.no_grad()
def load_snapshot(learner: "TrainerRank", slot: torch.Tensor) -> None:
    """Load the state of a slot, which must come from the same rank of the same layout."""
    small = pickle.loads(slot[8 : 8 + int(slot[:8].view(torch.int64))].numpy().tobytes())
    assert small["rank"] == dist.get_rank(), "a snapshot of another rank"
    for count, saved in zip(_counts(learner), small["counts"], strict=True):
        count.fill_(saved)
    for tensor, values in Layout(trained_tensors(learner)).places(slot):
        tensor.memory.copy_(values)
    learner.weights_changed()
    for role, scheduler in learner.schedulers().items():
        load_schedule(scheduler, small["schedulers"][role])
    set_random_state(small["random"])
