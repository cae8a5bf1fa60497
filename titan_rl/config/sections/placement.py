"""``[placement]``: which GPUs do what, and who shares them."""

from dataclasses import dataclass, field
from typing import Literal

from titan_rl.config.sections.kinds import Whole


@dataclass(kw_only=True)
class PlacementConfig:
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Who holds a device's memory. ``disaggregated``: trainer and generators side by side. ``colocated``: in turns;
    generators hold neither weights nor KV while the trainer works, and it no moments while they do; for
    ``rollout.max_staleness = 0``."""
    helper_generators: Whole = 0
    """Further engines on the trainer's devices, which sample while it waits for a batch, and sleep while it works. Each
    engine then takes at most ``generator.max_num_seqs`` samples at once, and one group more."""
    trainer: list[Whole] = field(default_factory=list)
    """GPUs, by their number on each host; empty: the first that nobody else names. Lists may name the same one."""
    generator: list[Whole] = field(default_factory=list)
    """The same of the engines; and so for roles with ``placement = "own"``."""
    reference: list[Whole] = field(default_factory=list)
    teacher: list[Whole] = field(default_factory=list)
    critic: list[Whole] = field(default_factory=list)
    implicit_reward: list[Whole] = field(default_factory=list)

    def helper_numbers(self, replicas: int) -> range:
        """Numbers of helper generators, which follow those of the replicas."""
        return range(replicas, replicas + self.helper_generators)


def most_samples(max_num_seqs: int, group_size: int, *, is_helper: bool) -> int:
    """Samples that an engine takes at once where there are helpers: one group more than run, so that none is idle; a
    helper, which may sleep before it comes to that, takes none more."""
    return max_num_seqs + group_size * (not is_helper)
