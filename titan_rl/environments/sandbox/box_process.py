"""Process behind bubblewrap's walls that runs a script of ours, and the socket to it."""

import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress

from titan_rl.environments.sandbox.program import SandboxFailed

_START_SECONDS = 20.0


class BoxProcess:
    """Owner of a process, from when its script is ready until ``close``."""

    def __init__(self, command_of: Callable[[int, int], list[str]], instructions: bytes):
        """``command_of``: the descriptors of its connection and its filter. ``instructions``: the filter's.

        Errors: SandboxFailed with bubblewrap's message; whatever the command raises."""
        self.control, box_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with box_end, tempfile.TemporaryFile() as seccomp, tempfile.TemporaryFile() as log:
            seccomp.write(instructions)
            seccomp.seek(0)
            descriptors = box_end.fileno(), seccomp.fileno()
            try:
                line = command_of(*descriptors)
            except BaseException:  # nobody has the object to close it
                self.control.close()
                raise
            # an empty environment: bubblewrap's own would be read by whoever is in the box
            self._process = subprocess.Popen(
                line, pass_fds=descriptors, env={}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            box_end.close()
            self.control.settimeout(_START_SECONDS)
            with suppress(OSError):
                if self.control.recv(16) == b"ready":
                    return
            self.close()
            log.seek(0)
            lines = log.read(4096).decode(errors="replace").strip().splitlines()
            raise SandboxFailed(lines[-1] if lines else "no output from the box")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether nothing in it runs any more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End all that is in it, without waiting for that."""
        self._process.kill()

    def close(self) -> None:
        """End all that is in it."""
        self.kill()
        self._process.wait()
        self.control.close()
