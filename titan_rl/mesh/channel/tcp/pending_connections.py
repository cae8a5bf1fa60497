"""Whoever connects to a listening socket of ours, before it is known who that is.

So many who say nothing cannot keep one out who does: when all places are taken, the newest has that of the oldest of
the address which has most of them.
"""

import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

MOST = 64
"""At once."""
BACKLOG = 1024
"""Connections that the kernel keeps until they are taken."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.05
"""Before it is tried again, where there was no room for another."""


class PendingConnections:
    """Listening socket that serves each connection in a thread of its own."""

    def __init__(
        self, listener: socket.socket, meet: Callable[[socket.socket, Callable[[], None]], None], name: str
    ) -> None:
        """``meet(connection, known)`` closes the connection in the end, and calls ``known`` once: from then on he is no
        stranger. ``name``: of those threads."""
        self._listener, self._meet, self._name = listener, meet, name
        self._places: dict[socket.socket, str] = {}
        """Who is met now, oldest first, and his address. The socket is a second one of the connection: TLS takes the
        first."""
        self._seating = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name=f"{name}s", daemon=True).start()

    def close(self) -> None:
        """From now on nothing listens here."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would keep it open
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, (host, *_) = self._listener.accept()
                try:
                    self._seat(connection, host)
                except OSError:
                    connection.close()
                    raise
            except OSError as error:
                if self._is_closed:
                    return
                if error.errno in _FULL:
                    self._turn_oldest_away()
                    time.sleep(_PAUSE_SECONDS)

    def _seat(self, connection: socket.socket, host: str) -> None:
        while len(self._places) >= MOST:
            self._turn_oldest_away()
        kept = connection.dup()
        with self._seating:
            self._places[kept] = host
        arguments = connection, lambda: self._leave(kept)
        try:
            threading.Thread(target=self._meet, args=arguments, name=self._name, daemon=True).start()
        except RuntimeError as error:  # no thread is to be had
            logging.getLogger(__name__).warning("a %s is turned away: %s", self._name, error)
            self._leave(kept)
            connection.close()
            time.sleep(_PAUSE_SECONDS)

    def _leave(self, kept: socket.socket) -> None:
        with self._seating:
            self._places.pop(kept, None)
            kept.close()

    def _turn_oldest_away(self) -> None:
        with self._seating:
            if not self._places:
                return
            [(most, _)] = Counter(self._places.values()).most_common(1)
            oldest = next(kept for kept, host in self._places.items() if host == most)
            del self._places[oldest]
            with suppress(OSError), oldest:  # its thread, which waits for it, hears that it has ended, and closes it
                oldest.shutdown(socket.SHUT_RDWR)
