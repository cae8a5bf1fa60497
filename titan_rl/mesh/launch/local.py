"""The default launcher: a child process of the controller."""

import subprocess
from typing import IO


class LocalLauncher:
    """Starts worker loops on this machine."""

    def launch(self, command: list[str], *, environment: dict[str, str], output: IO) -> subprocess.Popen:
        """In a process group of its own, so that Ctrl-C at the terminal does not reach it."""
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, process_group=0
        )
