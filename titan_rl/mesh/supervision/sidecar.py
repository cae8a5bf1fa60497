"""The steward: an actor beside the one that works, in the same process, which answers while that one is busy."""

import faulthandler
import os
import signal
from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from titan_rl.mesh.supervision.fault_injection import obey_orders
from titan_rl.mesh.supervision.logs import send_output_to

if TYPE_CHECKING:  # it needs torch
    from titan_rl.mesh.channel.snapshot_replica import Keeper


class Steward(Actor):
    """Tells who the process is, has its stacks written on SIGUSR1, and keeps what peers want kept."""

    @endpoint
    def start(self, logs: str | None, name: str) -> int:
        """Output goes to the logs from here on; this process's id."""
        send_output_to(logs, name)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        obey_orders()
        self.keepers: dict[int, Keeper] = {}
        return os.getpid()

    @endpoint
    def keep(self, handle) -> None:
        """Keep a trainer rank's snapshots (RegionHandle), instead of what was kept of that rank before."""
        from titan_rl.mesh.channel.snapshot_replica import Keeper

        if handle.rank in self.keepers:
            self.keepers[handle.rank].stop()
        self.keepers[handle.rank] = Keeper(handle)

    @endpoint
    def kept(self, rank: int):
        """Steps of a rank that are kept whole, and where (RegionHandle); it is not followed any more."""
        if rank not in self.keepers:
            return [], None
        return self.keepers[rank].steps(), self.keepers[rank].region.handle(over_rdma=False)
