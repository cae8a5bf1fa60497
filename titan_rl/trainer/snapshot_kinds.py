"""Which kind of snapshots a rank takes."""

from typing import TYPE_CHECKING

from titan_rl.config.sections.schema import Config
from titan_rl.trainer.model.parameter_memory import held_by
from titan_rl.trainer.state.snapshot import Layout, Snapshots
from titan_rl.trainer.state.snapshot_copied import CopiedSnapshots
from titan_rl.trainer.state.snapshot_in_place import SnapshotsInPlace

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import Side


def spares_memory(config: Config) -> bool:
    """Whether a rank on a CPU does so (snapshot_in_place.py): in turns, when it gives all back in each step anyway, and
    not where another host reads the copy by RDMA, whose pages must stay."""
    return config.placement.mode == "colocated" and not config.hosts.is_on


def make_snapshots(rank: int, learner: "Side", config: Config, before: Snapshots | None = None) -> Snapshots:
    """Of a ``trainer.rank_interface.Side``, before anybody else has a view of what it trains: that may move.

    ``before``: of this rank's learner before. Copies go on in its memory, where what it took is still to be read until
    these are opened: on a GPU's host it is as much as the state twice over, and takes long to pin.
    """
    if learner.device.type == "cpu" and not learner.has_views:
        return SnapshotsInPlace(rank, learner, spares_memory(config))
    size = Layout(held_by(learner)).size
    if isinstance(before, CopiedSnapshots) and (before.region.slot_bytes, before.region.blocks) == size:
        return CopiedSnapshots(rank, learner, before.region)
    return CopiedSnapshots(rank, learner)
