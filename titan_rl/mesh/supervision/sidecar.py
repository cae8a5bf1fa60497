"""The sidecar: an actor beside the one that works, in the same process, which answers while that one is busy."""

import faulthandler
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from titan_rl.mesh.processes.fault_injection import watch_for_faults
from titan_rl.mesh.processes.logs import send_output_to
from titan_rl.mesh.supervision.abort_collectives import end_collectives

if TYPE_CHECKING:  # it needs torch
    from titan_rl.mesh.channel.memory.region import RegionHandle
    from titan_rl.mesh.channel.snapshots.keeper import SnapshotKeeper


class Sidecar(Actor):
    """Sidecar of an actor: process id, stacks on SIGUSR1, and kept snapshots."""

    @endpoint
    def start(self, logs: str | None, name: str) -> int:
        """Output goes to the logs from here on, and the process has this name in ``top``; its id."""
        send_output_to(logs, name)
        Path("/proc/self/comm").write_text(name)  # the kernel keeps 15 bytes
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        watch_for_faults()
        self._keepers: dict[int, SnapshotKeeper] = {}
        return os.getpid()

    @endpoint
    def open_store(self, address: str) -> str:
        """Be where ranks of other hosts meet, in the place of the store before; where that is."""
        from titan_rl.mesh.resources.rendezvous import open_store

        self._store, place = open_store(address)
        return place

    @endpoint
    def end_collectives(self, lost: str = "") -> bool:
        """A peer is dead: those of NCCL would wait for it, and those of gloo, too, if its host is gone without a word.
        ``lost``: that host's address."""
        return end_collectives(lost)

    @endpoint
    def keep(self, handle: "RegionHandle") -> None:
        """Keep a trainer rank's snapshot region, in place of its earlier one."""
        from titan_rl.mesh.channel.snapshots.keeper import SnapshotKeeper

        if handle.rank in self._keepers:
            self._keepers.pop(handle.rank).close()
        self._keepers[handle.rank] = SnapshotKeeper(handle)

    @endpoint
    def kept(self, rank: int) -> "tuple[list[int], RegionHandle | None]":
        """Complete steps of a dead rank, with the region's handle."""
        if rank not in self._keepers:
            return [], None
        return self._keepers[rank].steps(), self._keepers[rank].handle
