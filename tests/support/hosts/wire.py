"""``python wire.py DELAY LOSS NAMESPACE...``: a switch in user space, for links that are slow and lossy.

Each namespace has a tap ``eth0``. A frame is lost with the chance LOSS, and else comes out DELAY seconds later at the
port behind which its address was last seen, or at all others. Which are lost is the same each time. It ends by a kill.
"""

import ctypes
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_NEW_NETWORK, _SET_INTERFACE, _TAP_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1002
_FRAME_BYTES, _AT_ONCE, _SEED = 1 << 16, 256, 17


def tap_of(namespace: str) -> int:
    """A descriptor of its ``eth0``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as space:
        if libc.setns(space.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", b"eth0", _TAP_WITHOUT_HEADER))
    return tap


class Wire:
    """Frames on their way. All are as long on it, so they arrive in the order in which they left."""

    def __init__(self, taps: list[int], delay: float, loss: float):
        self.taps, self.delay, self.loss = taps, delay, loss
        self._chance, self._ports = random.Random(_SEED), {}
        self._under_way: deque[tuple[float, int, bytes]] = deque()

    def take(self, tap: int) -> None:
        """What has come in there."""
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(tap, _FRAME_BYTES)
            except BlockingIOError:
                return
            to, source = frame[:6], frame[6:12]
            self._ports[source] = tap
            known = self._ports.get(to)
            for port in self.taps if known is None else [known]:
                if port != tap and self._chance.random() >= self.loss:
                    self._under_way.append((time.monotonic() + self.delay, port, frame))

    def deliver(self) -> float | None:
        """What has arrived; seconds until the next will, None if nothing is under way."""
        while self._under_way:
            due, port, frame = self._under_way[0]
            if (left := due - time.monotonic()) > 0:
                return left
            self._under_way.popleft()
            with suppress(OSError):  # its queue is full, or its host is off: lost
                os.write(port, frame)
        return None


if __name__ == "__main__":
    wire = Wire([tap_of(namespace) for namespace in sys.argv[3:]], float(sys.argv[1]), float(sys.argv[2]))
    incoming = selectors.DefaultSelector()
    for tap in wire.taps:
        incoming.register(tap, selectors.EVENT_READ)
    while True:
        for key, _ in incoming.select(wire.deliver()):
            wire.take(key.fd)
