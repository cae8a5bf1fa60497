"""``python flood.py``: another user of a host floods whatever of a run takes connections, until its input ends.

It begins as root and gives up its rights, with as many descriptors as this host allows. /dev/shm is filled, a bomb
forks, and every port and Unix socket that this host's tables show is connected to, over and over; connections are kept.
On its input is one line: how many connections, how many processes. It writes two lines of JSON: what it has filled and
forked, and, when its input has ended, how many connections it had.
"""

import json
import os
import resource
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from another_user import NOBODY, become

_BLOCK = bytes(1 << 20)
_TABLES = ("tcp", "tcp6", "unix")


def ports() -> list[int]:
    rows = [line.split() for table in _TABLES[:2] for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"})


def unix_sockets() -> list[str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7].replace("@", "\0", 1) for row in rows if row[3] == "00010000" and row[7:]]


def connected(family: int, place: object) -> socket.socket | None:
    try:
        one = socket.socket(family)
    except OSError:  # it has all that it may have
        return None
    one.settimeout(0.2)
    with suppress(OSError):
        one.connect(place)
        one.sendall(bytes(8))  # what a peer of gloo's would say first
        return one
    one.close()
    return None


def hold(most: int) -> list[socket.socket]:
    """Until the input ends."""
    held = []
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        places = [(socket.AF_INET, ("127.0.0.1", port)) for port in ports()]
        places += [(socket.AF_UNIX, path) for path in unix_sockets()]
        for place in places:
            for _ in range(min(500, most - len(held))):
                if (one := connected(*place)) is None:
                    break
                held.append(one)
    return held


def fork_bomb(count: int) -> int:
    """Processes that do nothing but be there and run now and then."""
    for number in range(count):
        try:
            pid = os.fork()
        except OSError:
            return number
        if pid == 0:
            while os.getppid() != 1:
                sum(range(20000))
                time.sleep(0.2)
            os._exit(0)
    return count


def fill_shared_memory() -> int:
    written = 0
    with suppress(OSError), open("/dev/shm/flood", "wb", buffering=0) as file:
        while True:
            written += file.write(_BLOCK)
    return written


if __name__ == "__main__":
    most, processes = map(int, sys.stdin.readline().split())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    become(NOBODY)
    print(json.dumps({"filled": fill_shared_memory(), "processes": fork_bomb(processes)}), flush=True)
    print(json.dumps({"connections": len(hold(most))}), flush=True)
    Path("/dev/shm/flood").unlink()
