"""How bytes get from one process to another, chosen for each pair of ranks by where the two are."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.mesh.resources.host_identity import host_identity

Transport = Literal["shared_memory", "cuda_ipc", "rdma_ibverbs", "rdma_tcp", "tcp"]
Setting = Literal["auto"] | Transport
"""``mesh.transport``."""
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
RDMA = frozenset({"rdma_ibverbs", "rdma_tcp"})
ON_GPU = frozenset({"cuda_ipc", "rdma_ibverbs"})
"""Those that reach a GPU's memory; what the others read has to lie in the host's."""


@dataclass(frozen=True)
class Place:
    """Host and device of a rank's tensors."""

    host: str
    """By its identity (mesh/resources/host_identity.py)."""
    device: str
    """``cpu`` or ``cuda``."""
    has_ibverbs: bool = False

    @property
    def in_memory(self) -> "Place":
        """Of what it keeps in its host's memory, whatever it computes with."""
        return Place(self.host, "cpu")


def here() -> Place:
    """This process's place."""
    import torch
    from monarch.rdma import is_ibverbs_available

    return Place(host_identity(), "cuda" if torch.cuda.is_available() else "cpu", is_ibverbs_available())


def choose_transport(setting: Setting, source: Place, destination: Place) -> Transport:
    """Fastest transport of both ends for ``auto``; otherwise the setting."""
    if setting != "auto":
        return setting
    if source.host == destination.host:
        return "cuda_ipc" if source.device == destination.device == "cuda" else "shared_memory"
    return "rdma_ibverbs" if source.has_ibverbs and destination.has_ibverbs else "tcp"


def staged_on_host(used: Iterable[tuple[int, Transport]]) -> set[int]:
    """Of (trainer rank, transport) of all pairs: the ranks that stage their weights in their host's memory."""
    return {rank for rank, transport in used if transport not in ON_GPU}


def from_host(transport: Transport) -> Transport:
    """To a rank that does."""
    return "shared_memory" if transport == "cuda_ipc" else transport


def describe(chosen: list[Transport]) -> str:
    """For the log: ``shared_memory (4 pairs)``."""
    counts = Counter(chosen)
    return ", ".join(f"{name} ({counts[name]} pair{'s' * (counts[name] > 1)})" for name in TRANSPORTS if counts[name])


def has_ibverbs() -> bool:
    """Whether this machine has RDMA hardware that Monarch can use."""
    from monarch.rdma import is_ibverbs_available

    return is_ibverbs_available()
