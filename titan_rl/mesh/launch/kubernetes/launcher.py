"""Hosts as pods that are there already, known by names that stay (manifests.py)."""

import asyncio
from contextlib import suppress

from titan_rl.config.hosts import HostsConfig
from titan_rl.mesh.launch.announcing import ask
from titan_rl.mesh.launch.base import HostOrder
from titan_rl.mesh.launch.kubernetes.options import ANNOUNCE_PORT, kubernetes_options

_POLL_SECONDS = 0.5


class KubernetesLauncher:
    """Waits for pods and asks each where it listens. It needs no right in the cluster, so a pod whose node has gone is
    left to Kubernetes; what comes back under its name is taken up."""

    def __init__(self, settings: HostsConfig):
        """Errors: ConfigError."""
        self._options = kubernetes_options(settings, settings.count)
        self.count, self._name = settings.count, settings.controller or self._options.controller
        self._seen: set[tuple[int, int]] = set()

    def rendezvous(self) -> str:
        return f"tls://{self._name}:0"

    async def start(self, order: HostOrder) -> str:
        """As soon as a pod of that name is free, at a port that no earlier one had."""
        host = self._options.host(order.number)
        while True:
            with suppress(OSError, ValueError):  # it is not there yet
                port = await asyncio.to_thread(ask, host, ANNOUNCE_PORT, is_tls=True)
                if port and (order.number, port) not in self._seen:
                    self._seen.add((order.number, port))
                    return f"tls://{host}:{port}"
            await asyncio.sleep(_POLL_SECONDS)

    async def watch(self, number: int) -> str:
        """Its silence alone tells."""
        return await asyncio.get_running_loop().create_future()

    async def kill(self, number: int) -> None:
        """Its program ends by itself when it hears no more of the controller, and the pod starts it anew."""
