"""The door for launchers: how a worker loop of the mesh comes to run.

A launcher starts the command that it is given, and hands back a process of this machine that lives exactly as long:
the worker loop itself (local.py), or a client that waits for it. The run watches that process. When it ends, the host
counts as dead; when it is killed, the worker loop must end too. The command holds the address at which the worker loop
is to listen. Today that is a socket file of this machine, so a launcher may wrap the command (``numactl``, a container
that shares the temporary folder), but not move it to another machine.
"""

import subprocess
from collections.abc import Sequence
from typing import IO, Protocol

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_signature, is_reference, resolve
from titan_rl.mesh.launch.local import LocalLauncher


class Launcher(Protocol):
    """Anything with this method; ``mesh.launcher`` may name one of the user's own."""

    def launch(self, command: list[str], *, environment: dict[str, str], output: IO) -> subprocess.Popen:
        """Start a command at once, without waiting for it.

        ``environment`` is complete: nothing is to be added from this process's own. It marks the run's processes, so
        it must reach the worker loop unchanged. ``output``: an open file for stdout and stderr. Ctrl-C at the terminal
        must not reach the command. Errors: OSError if it cannot be started.
        """
        ...


def make_launcher(name: str, folders: Sequence[str]) -> Launcher:
    """``local``, or what ``pkg.module:name`` names: an object with ``launch``, or a class of such, made without
    arguments. Errors: ConfigError."""
    said = f"mesh.launcher = {name!r}"
    if name == "local":
        return LocalLauncher()
    if not is_reference(name):
        raise ConfigError(f"{said} is unknown: give 'local', or 'module:name' of your own")
    found = resolve("mesh.launcher", name, folders)
    if isinstance(found, type):
        check_signature(said, found, ())
        found = found()
    if not callable(getattr(found, "launch", None)):
        raise ConfigError(f"{said} has no launch(command, *, environment, output): see mesh/launch/base.py")
    check_signature(f"{said}: launch", found.launch, ("command",), ("environment", "output"))
    return found
