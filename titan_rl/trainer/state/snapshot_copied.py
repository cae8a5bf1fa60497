"""Snapshots of state in other memory, such as a GPU's: copied beside the next forward pass."""

from titan_rl.mesh.channel.memory.region import NUM_SLOTS
from titan_rl.trainer.state.snapshot import Snapshots


class CopiedSnapshots(Snapshots):
    """Both slots hold copies; the older goes."""

    def take(self, step: int) -> None:
        self.writer.wait()
        self._forget_after(step)
        stamps = self.region.header.stamps
        slot = next((s for s in range(NUM_SLOTS) if stamps[s] == step), int(stamps.argmin()))
        # made anew each time: loading a checkpoint replaces the moments' tensors
        places = self.layout.places(self.region.slots[slot])
        self.writer.copies[slot] = [(place, held.memory) for held, place in places]
        self._begin(step, slot)

    def before_move(self) -> None:
        super().before_move()
        self.writer.copies = [[] for _ in range(NUM_SLOTS)]

    def settle(self) -> None:
        """The step before it is still there."""

    def before_update(self) -> None:
        self.writer.wait_until_copied()
