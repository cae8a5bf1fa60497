"""Hosts that somebody has started: ``titan-rl host`` runs at each address, and there is nothing to bring up.

One that was lost, by a cable or since it booted anew, comes back when it can be reached again and ``titan-rl host``
runs there: it is looked for as long as the run lasts.
"""

import asyncio
import socket

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import HostsConfig, parse_address
from titan_rl.mesh.launch.base import HostOrder
from titan_rl.mesh.launch.claims import until_it_listens


class AttachLauncher:
    """What knows nothing of a host but its address."""

    def __init__(self, settings: HostsConfig):
        """Errors: ConfigError."""
        if not settings.addresses:
            raise ConfigError(
                "hosts.launcher = 'attach' has nothing to attach to: start `titan-rl host tls://NAME:PORT` on each "
                "host, and list these in hosts.addresses"
            )
        self._addresses, self.count = settings.addresses, len(settings.addresses)
        self._name = settings.controller or socket.gethostname()

    def rendezvous(self) -> str:
        return f"{parse_address(self._addresses[0]).scheme}://{self._name}:0"

    async def start(self, order: HostOrder) -> str:
        """One that was lost: as soon as something listens there."""
        if order.attempt:
            await until_it_listens(parse_address(self._addresses[order.number]))
        return self._addresses[order.number]

    async def watch(self, number: int) -> str:
        """Its silence alone tells."""
        return await asyncio.get_running_loop().create_future()

    async def kill(self, number: int) -> None:
        """It ends by itself when it hears no more of the controller."""
