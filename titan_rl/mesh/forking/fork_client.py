"""``python -I -S fork_client.py SOCKET PROGRAM ARGUMENTS...``: PROGRAM, if it is Python, made by a fork server.

It stands for the process that the server forks: each ends when the other does, for whatever reason. Without a server it
becomes PROGRAM itself. It imports nothing but Python's own, since what it costs is what a fork costs.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
FORK_SECONDS = 15.0
"""How long a server has to fork: half of what Monarch gives a process to begin."""
_TELL_SECONDS = 1.0
"""How long it has to tell how a process ended."""


def ask(path: str, arguments: list[str]) -> tuple[socket.socket, int, int] | None:
    """The connection to the server, a descriptor of the process that it forked, and the end of a pipe: that process is
    killed when nobody holds it any more. None if there is no server, or it hangs."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
    }
    theirs, ours = os.pipe()
    try:
        server.settimeout(FORK_SECONDS)
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, theirs])
        os.close(theirs)
        _, [process], *_ = socket.recv_fds(server, 1, 1)
    except (OSError, ValueError):
        return None
    return server, process, ours


def wait(server: socket.socket, process: int) -> int:
    """Wait for the process; its exit code as in a shell, 1 if unknown."""
    waiting = select.poll()
    for source in (server.fileno(), process):
        waiting.register(source, select.POLLIN)
    while True:
        ready = {source for source, _ in waiting.poll()}
        if process in ready:
            readable, *_ = select.select([server], [], [], _TELL_SECONDS)
            reply = server.recv(4) if readable else b""
            return int(reply) if reply else 1
        waiting.unregister(server)  # the server is gone, which is nothing to the process


if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    path, program, *arguments = sys.argv[1:]
    forked = ask(path, arguments)
    if forked is None:
        os.execvp(program, [program, *arguments])
    sys.exit(wait(forked[0], forked[1]))
