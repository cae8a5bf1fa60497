"""``python -m titan_rl.mesh.processes.reaper PID FOLDER...``: clears away what a controller leaves behind.

Processes of a mesh end by themselves soon after their controller. Those that are stopped or hang do not, and once the
controller is gone only the reaper can end them. When none is left it removes the mesh's folders.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from titan_rl.mesh.processes import processes
from titan_rl.mesh.resources.scratch import remove_scratch

_SECONDS = 10.0


def start_reaper(mark: dict[str, str], folders: Iterable[Path]) -> None:
    """Start the reaper of this process's mesh.

    It carries the mesh's mark itself, and so ends with it. ``folders``: of the mesh and of this process, unused after
    its death.
    """
    command = [sys.executable, "-m", "titan_rl.mesh.processes.reaper", str(os.getpid()), *map(str, folders)]
    subprocess.Popen(command, env=os.environ | mark, stdin=subprocess.DEVNULL, start_new_session=True)


def reap(controller: int, mark: dict[str, str], folders: Iterable[Path], seconds: float = _SECONDS) -> None:
    """Wait for the controller's death; then end the processes with the mark, and remove the folders if all are gone."""
    try:
        descriptor = os.pidfd_open(controller)
    except ProcessLookupError:
        pass  # it is gone already
    else:
        select.select([descriptor], [], [])
    for _ in processes.ending(mark, seconds):
        time.sleep(0.02)
    if not set(processes.running(mark)) - {os.getpid()}:
        for folder in folders:
            remove_scratch(folder)


if __name__ == "__main__":
    reap(int(sys.argv[1]), {processes.MARK: os.environ[processes.MARK]}, [Path(folder) for folder in sys.argv[2:]])
