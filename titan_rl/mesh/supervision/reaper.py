"""``python -m titan_rl.mesh.supervision.reaper PID``: ends the processes that a controller leaves behind.

Processes of a mesh end by themselves soon after their controller. Those that are stopped or hang do not, and once the
controller is gone only the reaper can end them.
"""

import os
import select
import subprocess
import sys
import time

from titan_rl.mesh.supervision import processes

_SECONDS = 10.0


def start_reaper(mark: dict[str, str]) -> None:
    """One for this process's mesh. It carries the mesh's mark itself, and so ends with it."""
    command = [sys.executable, "-m", "titan_rl.mesh.supervision.reaper", str(os.getpid())]
    subprocess.Popen(command, env=os.environ | mark, stdin=subprocess.DEVNULL, start_new_session=True)


def _reap(controller: int, mark: dict[str, str]) -> None:
    try:
        descriptor = os.pidfd_open(controller)
    except ProcessLookupError:
        pass  # it is gone already
    else:
        select.select([descriptor], [], [])
    deadline = time.monotonic() + _SECONDS
    while (left := set(processes.running(mark)) - {os.getpid()}) and time.monotonic() < deadline:
        processes.kill(list(left))
        time.sleep(0.02)


if __name__ == "__main__":
    _reap(int(sys.argv[1]), {processes.MARK: os.environ[processes.MARK]})
