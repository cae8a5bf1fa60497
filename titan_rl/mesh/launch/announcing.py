"""A host that is known by its name alone tells where its worker loop listens, to who shows a certificate of the run.

Monarch takes an address for its first process for good, and what starts a host anew at the same name, as Kubernetes
does, can hand it no number. So it takes a port that is free, and tells which at one that is agreed upon; nothing is
told once a run has come, until the next start.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from titan_rl.config.hosts import Address
from titan_rl.config.load import ConfigError
from titan_rl.mesh.channel.tcp.security import accepted, connected

_SECONDS = 5.0
"""For one who asks, who holds up the others meanwhile."""
_BYTES = 16


def free_port(host: str) -> int:
    """Errors: ConfigError if that is not this machine."""
    with closing(_listen(host, 0)) as probe:
        return probe.getsockname()[1]


def _listen(host: str, port: int) -> socket.socket:
    try:
        [(family, *_, place), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


class Announcer:
    """Listens at one address of this machine for as long as the process lives."""

    def __init__(self, address: Address, port: int, files: tuple[str, str, str] | None, is_free: Callable[[], bool]):
        """``files``: certificate, key and authority; None: it tells everybody. Errors: ConfigError."""
        self._address, self._files, self._is_free = address, files, is_free
        self._server = _listen(address.host, port)

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._serve, name="announcer", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with suppress(OSError):  # of one who asked: a probe, or somebody without a certificate
                connection, _ = self._server.accept()
                connection.settimeout(_SECONDS)
                with closing(connection), closing(accepted(connection, self._files)) as asker:
                    asker.sendall(str(self._address.port if self._is_free() else 0).encode())


def ask(host: str, port: int, *, is_tls: bool) -> int:
    """Where a worker loop listens that is free; 0 if there is none now. Errors: OSError if nobody answers."""
    connection = socket.create_connection((host, port), _SECONDS)
    with closing(connection), closing(connected(connection, is_tls)) as asked:
        return int(asked.recv(_BYTES) or 0)
