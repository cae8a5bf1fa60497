"""Hosts as pods that are there already, known by names that stay (manifests.py)."""

import asyncio

from titan_rl.config.sections.hosts import Address, HostsConfig
from titan_rl.mesh.launch.base import HostOrder
from titan_rl.mesh.launch.claims import until_it_listens
from titan_rl.mesh.launch.kubernetes.options import HOST_PORT, kubernetes_options


class KubernetesLauncher:
    """Waits for pods. It needs no right in the cluster, so a pod whose node has gone is left to Kubernetes; what comes
    back under its name is taken up."""

    def __init__(self, settings: HostsConfig):
        """Errors: ConfigError."""
        self._options = kubernetes_options(settings, settings.count)
        self.count, self.wait = settings.count, self._options.wait
        self._name = settings.controller or self._options.controller

    def rendezvous(self) -> str:
        return f"tls://{self._name}:0"

    async def start(self, order: HostOrder) -> str:
        """As soon as something listens in the pod of that name."""
        address = Address("tls", self._options.host(order.number), HOST_PORT)
        await until_it_listens(address)
        return str(address)

    async def watch(self, number: int) -> str:
        """Its silence alone tells."""
        return await asyncio.get_running_loop().create_future()

    async def kill(self, number: int) -> None:
        """It ends what runs there by itself when it hears no more of the controller, and is there for the next."""
