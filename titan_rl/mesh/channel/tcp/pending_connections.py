"""Whoever connects to a listening socket of ours, before it is known who that is."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

MOST = 64
"""At once: more are turned away."""


class Strangers:
    """Owns the socket. Each is met in a thread of its own, in which everything with him may happen."""

    def __init__(
        self, listener: socket.socket, meet: Callable[[socket.socket, Callable[[], None]], None], name: str
    ) -> None:
        """``meet(connection, known)`` closes the connection in the end, and calls ``known`` once: from then on he is no
        stranger. ``name``: of those threads."""
        self._listener, self._meet, self._name = listener, meet, name
        self._places = threading.Semaphore(MOST)
        threading.Thread(target=self._accept, name=f"{name}s", daemon=True).start()

    def close(self) -> None:
        """From now on nothing listens here."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would keep it open
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            if self._places.acquire(blocking=False):
                arguments = connection, self._places.release
                threading.Thread(target=self._meet, args=arguments, name=self._name, daemon=True).start()
            else:
                connection.close()
