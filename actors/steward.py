"""The steward: an actor beside the one that works, in the same process, which answers while that one is busy."""

import faulthandler
import os
import signal

from monarch.actor import Actor, endpoint

from titan_rl.faults import obey_orders
from titan_rl.mesh.logs import send_output_to


class Steward(Actor):
    """Tells who the process is, has its stacks written on SIGUSR1, and keeps what peers want kept."""

    @endpoint
    def start(self, logs: str | None, name: str) -> int:
        """Output goes to the logs from here on; this process's id."""
        send_output_to(logs, name)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        obey_orders()
        self.keeper = None
        return os.getpid()

    @endpoint
    def keep(self, handle) -> None:
        """Keep a trainer rank's snapshots (RegionHandle), instead of what was kept before."""
        from titan_rl.snapshot import Keeper

        if self.keeper is not None:
            self.keeper.stop()
        self.keeper = Keeper(handle)

    @endpoint
    def kept(self):
        """Steps that are kept whole, and where (RegionHandle); nothing is followed any more."""
        if self.keeper is None:
            return [], None
        return self.keeper.steps(), self.keeper.region.handle(over_rdma=False)
