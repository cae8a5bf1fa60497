"""Commands of the command line whose imports are done: forked from a server, which tests share, as actors are.

What they import takes longer than a small run. Only for those that come to their own end: what is started is a client
of the server, which a signal would not go through.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_rl.mesh.forking import fork_client, forking

SERVER = "TITAN_RL_TESTS_COMMANDS"
"""Environment variable: the folder in which it listens."""
_KIND = "command"
_SOCKET = (socket.AF_UNIX, socket.SOCK_SEQPACKET)


def command(*arguments: str | Path) -> list[str]:
    """``python ARGUMENTS``, which begin with ``-m``; as it is where there is no server."""
    if (folder := os.environ.get(SERVER)) is None:
        return [sys.executable, *map(str, arguments)]
    client = forking.client_arguments(fork_client.__file__, folder, _KIND, sys.executable, list(map(str, arguments)))
    return [sys.executable, *client]


@contextmanager
def served(environment: dict[str, str]) -> Iterator[None]:
    """``command`` forks meanwhile."""
    with tempfile.TemporaryDirectory(prefix="commands_") as folder, socket.socket(*_SOCKET) as listener:
        listener.bind(f"{folder}/{_KIND}")
        listener.listen()
        server = [sys.executable, __file__, str(listener.fileno())]
        given = dict(env=environment | forking.no_mark(), stdin=subprocess.PIPE, start_new_session=True)
        with subprocess.Popen(server, pass_fds=[listener.fileno()], **given):  # it ends when its input is closed
            os.environ[SERVER] = folder
            yield
            del os.environ[SERVER]


def main(descriptor: int) -> None:
    import gc

    import matplotlib.figure  # noqa: F401
    import pandas  # noqa: F401  (pyarrow imports it)
    import torch.utils.tensorboard  # noqa: F401

    import titan_rl.controller.preflight.checks  # noqa: F401  (most of a run's; Monarch's would start threads)
    import titan_rl.environments.reasoning_gym.task  # noqa: F401
    from titan_rl.mesh.forking.fork_server import ForkServer, become

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    asked = ForkServer(socket.socket(fileno=descriptor)).run()
    if asked is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(asked)


if __name__ == "__main__":
    main(int(sys.argv[1]))
