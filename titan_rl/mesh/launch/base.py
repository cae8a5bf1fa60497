"""The door for launchers: how a worker loop of the mesh comes to run.

A launcher starts the command that it is given, and hands back a process of this machine that lives exactly as long:
the worker loop itself (local.py), or a client that waits for it. The run watches that process. When it ends, the host
counts as dead; when it is killed, the worker loop must end too. The command holds the address at which the worker loop
is to listen. Today that is a socket file of this machine, so a launcher may wrap the command (``numactl``, a container
that shares /tmp), but not move it to another machine.
"""

import subprocess
from typing import IO, Protocol


class Launcher(Protocol):
    """Anything with this method; ``mesh.launcher`` may name one of the user's own."""

    def launch(self, command: list[str], *, environment: dict[str, str], output: IO) -> subprocess.Popen:
        """Start a command at once, without waiting for it.

        ``environment`` is complete: nothing is to be added from this process's own. It marks the run's processes, so
        it must reach the worker loop unchanged. ``output``: an open file for stdout and stderr. Ctrl-C at the terminal
        must not reach the command. Errors: OSError if it cannot be started.
        """
        ...
