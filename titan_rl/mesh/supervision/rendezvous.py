"""Where the ranks of a process group are told to meet, by where they are."""

from collections.abc import Sequence
from pathlib import Path

from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.mesh.supervision.remote_call import SidecarEndpoints


async def rendezvous(ranks: Sequence[ActorProcess], file: Path) -> str:
    """A new one (resources/rendezvous.py): ``file``, which must not exist yet, if all are on the controller's host;
    else a store in the process of the first, on the interface of its host that the run uses. Errors: ActorDied."""
    first = ranks[0]
    if not any(rank.host.is_remote for rank in ranks):
        return str(file)
    opening = SidecarEndpoints.open_store(first.host.remote_facts.address)
    return f"{await first.ask_sidecar(opening)}/{file.name}"
