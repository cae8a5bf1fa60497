"""Which kind of snapshots a rank takes."""

from titan_rl.trainer.snapshot import Snapshots
from titan_rl.trainer.snapshot_copies import CopiedSnapshots
from titan_rl.trainer.snapshot_in_place import SnapshotsInPlace


def make_snapshots(rank: int, learner) -> Snapshots:
    """Of a ``trainer.side.Side``, before anybody else has a view of what it trains: that may move."""
    in_place = learner.device.type == "cpu" and not learner.has_views
    return (SnapshotsInPlace if in_place else CopiedSnapshots)(rank, learner)
