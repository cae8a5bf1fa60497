"""The sidecar: an actor beside the one that works, in the same process, which answers while that one is busy."""

import faulthandler
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from titan_rl.mesh.supervision.fault_injection import obey_orders
from titan_rl.mesh.supervision.logs import send_output_to

if TYPE_CHECKING:  # it needs torch
    from titan_rl.mesh.channel.snapshot_replica import SnapshotReplica


class Sidecar(Actor):
    """Tells the process's id, has its stacks written on SIGUSR1, and holds replicas of trainer ranks' snapshots."""

    @endpoint
    def start(self, logs: str | None, name: str) -> int:
        """Output goes to the logs from here on, and the process has this name in ``top``; its id."""
        send_output_to(logs, name)
        Path("/proc/self/comm").write_text(name)  # the kernel keeps 15 bytes
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        obey_orders()
        self.replicas: dict[int, SnapshotReplica] = {}
        return os.getpid()

    @endpoint
    def replicate(self, handle) -> None:
        """Copy a trainer rank's snapshots (RegionHandle) here from now on, and no other region of that rank."""
        from titan_rl.mesh.channel.snapshot_replica import SnapshotReplica

        if handle.rank in self.replicas:
            self.replicas[handle.rank].stop()
        self.replicas[handle.rank] = SnapshotReplica(handle)

    @endpoint
    def replica(self, rank: int):
        """Steps of a rank that are complete here, and where they are (RegionHandle). No later ones are copied."""
        if rank not in self.replicas:
            return [], None
        return self.replicas[rank].steps(), self.replicas[rank].region.handle(over_rdma=False)
