"""Notice of a rank's death to its peers: gloo raises by itself, NCCL kernels spin.

    a rank dies ─▶ the controller tells its peers' sidecars ─▶ they abort NCCL ─▶ the kernels end ─▶ the peers raise

Where a whole host is gone without a word, gloo waits, too: its connections to that host are closed then.

Without that a peer would be killed as hung, and what it keeps for others would go with it. Here is the controller's
part; that of the peers' processes is in collectives.py.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.remote_call import SidecarEndpoints


class PeerNotifier:
    """Notifier of ranks about dead peers."""

    def __init__(self, peers: Callable[[], Iterable[ActorProcess]]):
        """``peers``: all ranks that have collectives with each other now."""
        self._peers, self._background = peers, BackgroundTasks()

    def watch(self, process: ActorProcess) -> ActorProcess:
        """Notify the peers of this process at its death."""
        process.deaths.register("peers", self._tell_peers_of)
        return process

    def _tell_peers_of(self, dead: ActorProcess) -> None:
        peers = list(self._peers())
        if dead in peers and not dead.is_stopping:
            for peer in peers:
                if not peer.is_dead:
                    self._background.start(self._notify(peer, _lost_with(dead)))

    async def _notify(self, peer: ActorProcess, lost: str) -> None:
        with suppress(ActorDied):  # its owner knows, or will: it is killed as hung then
            await peer.ask_sidecar(SidecarEndpoints.end_collectives(lost))

    def stop(self) -> None:
        self._background.cancel()


def _lost_with(dead: ActorProcess) -> str:
    """The address of a host that is lost with it; empty if only the process is dead, and its kernel has said so."""
    host = dead.host
    return host.facts.address if host.facts is not None and host.died.done() else ""
