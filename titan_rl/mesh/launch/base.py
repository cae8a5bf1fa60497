"""The doors for launchers: how hosts of other machines come up, and how a worker loop of this one does.

``HostLauncher`` (``hosts.launcher``) is for other machines. Whatever it uses, what runs on a host in the end is

    titan-rl host tls://NAME:PORT --once     (``host_command``; NAME may be left out: the machine's own)

which listens there until the run's controller is gone, or none has come in time. The run asks the launcher for a host,
asks at the address that it gets for a worker loop (launch/claims.py), and has an agent there
(hosts/agent.py) that tells of processes. A host that is silent for ``hosts.silence`` is lost, whatever the
launcher says; what it knows earlier it says by ``watch``.

``Launcher`` (``mesh.launcher``) is for worker loops on this machine. It starts the command that it is given, and hands
back a process of this machine that lives exactly as long: the worker loop itself (local.py), or a client that waits for
it. The run watches that process. When it ends, the host counts as dead; when it is killed, the worker loop must end
too. The command holds the address at which the worker loop is to listen, a socket file of this machine, so a launcher
may wrap the command (``numactl``, a container that shares the temporary folder), but not move it to another machine.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.plugins import check_signature, is_reference, resolve
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.mesh.launch.local import LocalLauncher

BUILT_IN = {
    "attach": "titan_rl.mesh.launch.attach:AttachLauncher",
    "slurm": "titan_rl.mesh.launch.slurm.launcher:SlurmLauncher",
    "kubernetes": "titan_rl.mesh.launch.kubernetes.launcher:KubernetesLauncher",
}
"""Launchers of hosts by name."""


# hosts of other machines


class HostUnavailable(RuntimeError):
    """Failure of a host to come up, with the reason."""


@dataclass(frozen=True)
class HostOrder:
    """Request for a host."""

    number: int
    """Of the host, from 0, as the lists of ``[hosts]`` count them."""
    attempt: int
    """0, and more each time that this host is asked for again after it was lost. It may listen where it did before."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What ``titan-rl host`` must find in its environment, besides HYPERACTOR_TLS_*, which are the launcher's."""


class HostLauncher(Protocol):
    """Made as ``launcher(settings: HostsConfig)``, before anything starts: errors there are ConfigError, one line."""

    count: int
    """Of hosts."""

    def rendezvous(self) -> str:
        """The address at which hosts reach this process, such as ``tls://NAME:0``; port 0: any that is free."""
        ...

    async def start(self, order: HostOrder) -> str:
        """Have a host come up; the address of its ``titan-rl host`` (``tls://NODE:PORT``), which may listen later.

        The run gives it ``mesh.start_timeout`` (and ``wait`` seconds more, if the launcher has an attribute of that
        name: for a queue), and starts all at once; one that was lost may take as long as it likes.
        Errors: HostUnavailable.
        """
        ...

    async def watch(self, number: int) -> str:
        """Until the launcher knows that a host is gone: why, in words. One that cannot know never returns."""
        ...

    async def kill(self, number: int) -> None:
        """See to it that the host is gone, and what was reserved for it; also when it never came up, and again. Never
        raises. Called for each host when the run ends, and for one that was lost before it is asked for again."""
        ...


def host_command(address: str) -> list[str]:
    """Command to run on a host, for one run."""
    return [sys.executable, "-m", "titan_rl.cli", "host", address, "--once"]


def make_host_launcher(settings: HostsConfig, folders: Sequence[str]) -> HostLauncher | None:
    """None for ``local``. Errors: ConfigError, the launcher's own included."""
    setting = f"hosts.launcher = {settings.launcher!r}"
    if not settings.is_on:
        return None
    if not is_reference(settings.launcher) and settings.launcher not in BUILT_IN:
        names = sorted(["local", *BUILT_IN])
        close = nearest(settings.launcher, names).removeprefix("known: ")
        hint = f"{close} Known" if close.endswith("?") else "known"
        raise ConfigError(f"{setting} is unknown: {hint}: {', '.join(names)}; or give 'module:name' of your own")
    factory = resolve("hosts.launcher", BUILT_IN.get(settings.launcher, settings.launcher), folders)
    check_signature(setting, factory, ("settings",))
    launcher = factory(settings)
    for method in ("rendezvous", "start", "watch", "kill"):
        if not callable(getattr(launcher, method, None)):
            raise ConfigError(f"{setting} has no {method}(...): see mesh/launch/base.py")
    return launcher


# worker loops of this machine


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
    setting = f"mesh.launcher = {name!r}"
    if name == "local":
        return LocalLauncher()
    if not is_reference(name):
        raise ConfigError(f"{setting} is unknown: give 'local', or 'module:name' of your own")
    resolved = resolve("mesh.launcher", name, folders)
    if isinstance(resolved, type):
        check_signature(setting, resolved, ())
        resolved = resolved()
    if not callable(getattr(resolved, "launch", None)):
        raise ConfigError(f"{setting} has no launch(command, *, environment, output): see mesh/launch/base.py")
    check_signature(f"{setting}: launch", resolved.launch, ("command",), ("environment", "output"))
    return resolved
