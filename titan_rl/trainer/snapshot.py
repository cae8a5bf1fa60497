"""A trainer rank's snapshots: its state in memory that outlives it, since another process holds it too.

After a step a rank copies its shard of the trained weights and their moments into a region of its own, beside the next
forward. When a rank dies, the one that takes its place loads what was kept and the survivors load their own snapshots,
so all go on from one step. Two steps are there: a rank may die mid-copy, and all ranks need one common step.
"""

import pickle

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_rl.mesh.channel.plan import BLOCK_BYTES
from titan_rl.mesh.channel.region import FAILED, NUM_SLOTS, Region
from titan_rl.mesh.channel.slots import SlotWriter
from titan_rl.trainer.optimizer import load_schedule
from titan_rl.trainer.state import random_state, set_random_state

_SMALL_BYTES = 256 << 10
"""Room for everything but weights and moments: random states, schedule, counts."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NICE = 10
"""Snapshots are copied beside weights that generators wait for, and beside what they generate."""
_CPU = torch.device("cpu")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parameters(learner) -> list[tuple[torch.Tensor, dict]]:
    """(parameter, its optimizer's state), in an order that all processes of a rank agree on."""
    return [
        (parameter, optimizer.state)
        for optimizer in learner.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _layout(learner) -> tuple[list[tuple[int, int]], int]:
    """(offset, bytes) of each parameter's and moment's place behind the small part, and the size of a slot."""
    places, offset = [], _SMALL_BYTES
    for parameter, _ in _parameters(learner):
        for _ in range(1 + len(_MOMENTS)):
            nbytes = _local(parameter.detach()).nbytes
            places.append((offset, nbytes))
            offset += -(-nbytes // 64) * 64
    return places, offset


def _blocks(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK_BYTES, nbytes)) for start in range(0, nbytes, BLOCK_BYTES)]


class Snapshots:
    """A rank's own: takes them, and restores from them."""

    def __init__(self, rank: int, learner):
        self.learner = learner
        self._places, nbytes = _layout(learner)
        self.region = Region(rank, nbytes, _blocks(nbytes), _CPU)
        self._writer = SlotWriter(self.region, [[] for _ in range(NUM_SLOTS)], nice=_NICE)

    def take(self, step: int) -> None:
        """Begin to copy the state after ``step``; the next update must wait for it (``wait_until_copied``)."""
        self._writer.wait()
        stamps = self.region.header.stamps
        stamps[stamps > step] = FAILED  # the run went back, and will take those steps again
        slot = next((s for s in range(NUM_SLOTS) if stamps[s] == step), int(stamps.argmin()))
        into = self.region.slots[slot]
        small = pickle.dumps(self._small())
        if len(small) + 8 > _SMALL_BYTES:
            raise ValueError(f"a rank's random and schedule states take {len(small)} bytes, more than {_SMALL_BYTES}")

        def write_small() -> None:
            into[:8] = torch.tensor([len(small)]).view(torch.uint8)
            into[8 : 8 + len(small)] = torch.frombuffer(bytearray(small), dtype=torch.uint8)

        # made anew each time: loading a checkpoint replaces the moments' tensors
        self._writer.copies[slot] = [(_view(into, place, values), values) for place, values in self._tensors()]
        self._writer.begin(step, slot, write_small)

    def _tensors(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """(place in a slot, this rank's values) of all parameters and their moments."""
        tensors = [
            tensor
            for parameter, states in _parameters(self.learner)
            for tensor in (parameter.detach(), *(states[parameter][name] for name in _MOMENTS))
        ]
        return [(place, _local(tensor)) for place, tensor in zip(self._places, tensors, strict=True) if place[1]]

    def _small(self) -> dict:
        return {
            "rank": dist.get_rank(),
            "random": random_state(),
            "schedulers": {role: one.state_dict() for role, one in self.learner.schedulers().items()},
            "counts": [float(states[parameter]["step"]) for parameter, states in _parameters(self.learner)],
        }

    def wait_until_copied(self) -> None:
        self._writer.wait_until_copied()

    def steps(self) -> list[int]:
        """Steps whose state is complete here."""
        self._writer.wait()
        return sorted(int(stamp) for stamp in self.region.header.stamps if stamp >= 0)

    def slot_of(self, step: int) -> torch.Tensor:
        return self.region.slots[[int(stamp) for stamp in self.region.header.stamps].index(step)]

    @torch.no_grad()
    def load(self, slot: torch.Tensor) -> None:
        """Put the learner into the state that a slot holds. It must come from the same rank of the same layout."""
        small = pickle.loads(slot[8 : 8 + int(slot[:8].view(torch.int64))].numpy().tobytes())
        assert small["rank"] == dist.get_rank(), "a snapshot of another rank"
        for (parameter, states), count in zip(_parameters(self.learner), small["counts"], strict=True):
            states[parameter]["step"].fill_(count)
        for place, values in self._tensors():
            values.copy_(_view(slot, place, values))
        self.learner.weights_changed()
        for role, scheduler in self.learner.schedulers().items():
            load_schedule(scheduler, small["schedulers"][role])
        set_random_state(small["random"])


def _view(slot: torch.Tensor, place: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    offset, nbytes = place
    return slot[offset : offset + nbytes].view(like.dtype).view(like.shape)
