"""Hosts that share nothing but a wire, on one machine: each is a set of namespaces, with a cable into one switch.

A host has a network, process ids, hostname, IPC, /dev/shm and /tmp of its own; what else there is on the disk all of
them see, so a test keeps its run in a temporary folder. ``cut`` takes out a cable without a word (no carrier is lost,
no connection reset), ``off`` is a power cut: first the cable, then every process at once, so that nobody hears of it.
``on`` boots such a host anew. With a ``Link`` the switch is wire.py, which makes every way slow and lossy.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tree import TREE

_BOOT_SECONDS = 10.0
_numbers = itertools.count()
_QUIET = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
_BOOT = """
hostname {name}
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount --bind {state}/hosts /etc/hosts
{keep}
mount -t tmpfs -o mode=1777 tmpfs /tmp
{put_back}
touch /tmp/.booted
trap "" INT
while :; do sleep 1000 & wait $!; done
"""


def why_not() -> str:
    """Why such hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    if missing := [tool for tool in ("ip", "nsenter", "taskset", "unshare") if shutil.which(tool) is None]:
        return f"hosts of namespaces need {missing[0]}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "tt0", "type", "veth", "peer", "tt1"],
        capture_output=True,
        text=True,
    )
    return f"namespaces may not be made here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Link:
    """From any host to any other."""

    delay: float
    """Seconds, one way."""
    loss: float
    """Share of the packets, one way."""


class Machines:
    """Some hosts, by name; as a context they are gone at its end, with all that ran there."""

    def __init__(self, *names: str, folder: Path | None = None, link: Link | None = None, one_core_each: bool = False):
        """``folder``: kept visible to all, for keys and what a test wants to look at. ``link``: None for one as good as
        the kernel's own. ``one_core_each``: of this machine's, in turn; else each has all of them."""
        self._link, self._wire = link, None
        cores = sorted(os.sched_getaffinity(0))
        turns = zip(names, itertools.cycle(cores), strict=False)
        self._cores = {name: [core] if one_core_each else cores for name, core in turns}
        self.names, self._id = names, f"tt{os.getpid() % 100000}_{next(_numbers)}"
        self.state = Path(tempfile.mkdtemp(prefix="tt_", dir="/run"))
        self._boots: dict[str, subprocess.Popen] = {}
        self._pids: dict[str, int] = {}
        below_tmp = [TREE, Path(sys.prefix), Path(sys.base_prefix), folder]
        self._visible = [path for path in below_tmp if path is not None and Path("/tmp") in path.resolve().parents]

    def __enter__(self) -> "Machines":
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _up(self) -> None:
        lines = [f"10.78.0.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.state / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        switch = f"{self._id}-switch"
        _ip("netns", "add", switch)
        if self._link is None:
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names, 1):
            space = f"{self._id}-{name}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            if self._link is None:
                _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"v{name}", "netns", switch)
                _ip("-n", switch, "link", "set", f"v{name}", "master", "br0", "up")
            else:
                _ip("-n", space, "tuntap", "add", "dev", "eth0", "mode", "tap")
            _ip("-n", space, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            self._boot(name)
        if self._link is not None:
            command = [sys.executable, str(Path(__file__).with_name("wire.py")), str(self._link.delay)]
            command += [str(self._link.loss), *(f"{self._id}-{name}" for name in self.names)]
            self._wire = subprocess.Popen(command)

    def _boot(self, name: str) -> None:
        kept = [(path, f"{self.state}/kept{path}") for path in self._visible]
        keep = [f"mkdir -p {aside}; mount --bind {path} {aside}" for path, aside in kept]
        put_back = [f"mkdir -p {path}; mount --move {aside} {path}" for path, aside in kept]
        script = _BOOT.format(name=name, state=self.state, keep="\n".join(keep), put_back="\n".join(put_back))
        unshared = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "bash", "-c", script]
        entered = ["nsenter", f"--net=/run/netns/{self._id}-{name}", *unshared]
        self._boots[name] = subprocess.Popen(entered, start_new_session=True, **_QUIET)
        deadline = time.monotonic() + _BOOT_SECONDS
        while (pid := self._first_process(name)) is None:
            assert time.monotonic() < deadline, f"host {name} did not boot"
            time.sleep(0.02)
        self._pids[name] = pid

    def _first_process(self, name: str) -> int | None:
        for pid in _ip("netns", "pids", f"{self._id}-{name}").split():
            with suppress(OSError):
                [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "NSpid" in line]
                if line.split()[-1] == "1" and Path(f"/proc/{pid}/root/tmp/.booted").exists():
                    return int(pid)
        return None

    def address(self, name: str) -> str:
        return f"10.78.0.{1 + self.names.index(name)}"

    def start(self, name: str, *command: str, **options) -> subprocess.Popen:
        """A command on a host; ``options``: of Popen."""
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={Path.cwd()}"]
        on = ["taskset", "--cpu-list", ",".join(map(str, self._cores[name]))]
        return subprocess.Popen([*on, "nsenter", "-t", str(self._pids[name]), *spaces, "--", *command], **options)

    def first(self, name: str) -> int:
        """The id, as seen from here, of a host's first process."""
        return self._pids[name]

    def path(self, name: str, path: str) -> Path:
        """A path of a host's, as it is seen from here."""
        return Path(f"/proc/{self._pids[name]}/root{path}")

    def cut(self, name: str) -> None:
        assert self._link is None, "a wire of wire.py stays"
        _ip("-n", f"{self._id}-switch", "link", "set", f"v{name}", "nomaster")

    def join(self, name: str) -> None:
        _ip("-n", f"{self._id}-switch", "link", "set", f"v{name}", "master", "br0")

    def off(self, name: str) -> None:
        self.cut(name)
        os.kill(self._pids[name], signal.SIGKILL)

    def on(self, name: str) -> None:
        """After ``off``, when its last process is gone."""
        deadline = time.monotonic() + _BOOT_SECONDS
        while _ip("netns", "pids", f"{self._id}-{name}").split():
            assert time.monotonic() < deadline, f"host {name} is not off"
            time.sleep(0.02)
        self._boots[name].wait()
        self._boot(name)
        self.join(name)

    def processes(self, name: str) -> list[int]:
        """Ids, as seen from here, of all that runs on a host besides its first."""
        return [int(pid) for pid in _ip("netns", "pids", f"{self._id}-{name}").split() if int(pid) != self._pids[name]]

    def __exit__(self, *_) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for boot in self._boots.values():
            boot.wait()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        for name in (*self.names, "switch"):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._id}-{name}")
        shutil.rmtree(self.state, ignore_errors=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
