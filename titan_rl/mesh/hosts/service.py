"""What a host does for one controller: a worker loop of its own, and all that runs in it."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from titan_rl.config.sections.hosts import Address
from titan_rl.mesh.hosts.worker_loop import ADDRESS_FILE, AGENT_FILE, ENDS_WITH
from titan_rl.mesh.launch.claims import Claim
from titan_rl.mesh.processes import processes
from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch

_ATTACH_SECONDS = 120.0
"""How long a controller may take to attach to the loop that it asked for."""
_START_SECONDS = 40.0
_POLL_SECONDS = 0.02
_END_SECONDS = 5.0


class HostService:
    """Worker loop for one claim, with its processes and folder. Errors of the constructor: OSError."""

    def __init__(self, reception: Address, environment: Mapping[str, str], claim: Claim):
        """``reception``: where the host is asked for loops; this one listens beside it, at a port that is free."""
        self.claim, self._scratch, self._mark = claim, make_scratch(), processes.new_mark()
        address = f"{reception.scheme}://{reception.name}:{_free_port(reception.host)}"
        own = self._mark | {"TMPDIR": str(self._scratch), ENDS_WITH: str(os.getpid())}
        command = [sys.executable, "-m", "titan_rl.mesh.hosts.worker_loop", address]
        self._loop = subprocess.Popen(
            command, env={**environment, **own}, stdin=subprocess.DEVNULL, process_group=0, umask=0o077
        )
        self._deadline = time.monotonic() + _ATTACH_SECONDS
        self._agent: int | None = None
        """A descriptor of the agent's process, once the controller has attached."""

    def address(self) -> str:
        """Address of the loop; empty if it did not come up."""
        deadline, file = time.monotonic() + _START_SECONDS, self._scratch / ADDRESS_FILE
        while not file.exists() and self._loop.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return file.read_text() if file.exists() else ""

    def why_over(self) -> str:
        """Reason of the end, for messages; empty while the run goes on."""
        if self._loop.poll() is not None:
            return f"its worker loop has ended with {self._loop.returncode}"
        if self._agent is None:
            self._agent = self._find_agent()
        if self._agent is None:
            return "it did not attach to what it asked for" if time.monotonic() > self._deadline else ""
        with suppress(InterruptedError):
            if select.select([self._agent], [], [], 0)[0]:
                return "it is over, or has not been heard of for too long"
        return ""

    def _find_agent(self) -> int | None:
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            return os.pidfd_open(int((self._scratch / AGENT_FILE).read_text()))
        return None

    def end(self) -> None:
        """End all processes and remove their files."""
        for _ in processes.ending(self._mark, _END_SECONDS):
            time.sleep(_POLL_SECONDS)
        with suppress(ProcessLookupError):
            self._loop.send_signal(signal.SIGKILL)
        self._loop.wait()
        if self._agent is not None:
            os.close(self._agent)
        remove_scratch(self._scratch)


def _free_port(name: str) -> int:
    """A moment later another process may have it: then the loop ends, and its controller asks again."""
    family, _, _, _, (host, *_) = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server((host, 0), family=family) as listener:
        return listener.getsockname()[1]
