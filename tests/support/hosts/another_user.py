"""What another user of this host gets: a fork of the test that gives up its rights and tries."""

import json
import os
import socket
from collections.abc import Callable

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def as_another_user(attempts: dict[str, Callable[[], object]], user: int = NOBODY) -> list[str]:
    """Names of the attempts that succeed for that user."""
    ours, its = os.pipe()
    if (pid := os.fork()) == 0:
        become(user)
        os.write(its, json.dumps([name for name, attempt in attempts.items() if succeeds(attempt)]).encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(ours) as answer:
        found = json.loads(answer.read())
    os.waitpid(pid, 0)
    return found


def succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def ask(port: int, request: bytes) -> bytes:
    """The first bytes of what a port of loopback answers. Errors: OSError, also if it ends the connection first."""
    with socket.socket() as one:
        one.settimeout(20)
        one.connect(("127.0.0.1", port))
        one.sendall(request)
        if not (answer := one.recv(1 << 16)):
            raise ConnectionResetError
        return answer
