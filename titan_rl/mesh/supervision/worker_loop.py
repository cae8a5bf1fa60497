"""``python -m titan_rl.mesh.supervision.worker_loop ADDRESS``: a Monarch host.

Whoever can connect to it may run code as its owner, so its sockets are in the run's scratch folder alone, which is
TMPDIR here; what listens beyond this machine asks for a certificate (host_command.py). The controller stops it, or the
process that started it: neither Ctrl-C (a process group of its own) nor a closed terminal does.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

AGENT_FILE = "agent.pid"
"""In TMPDIR: the id of the agent's process, once a run has attached (agent.py)."""
ENDS_WITH = "TITAN_RL_HOST_PROCESS"
"""Environment variable: the id of the process with which this one ends."""
_PR_SET_PDEATHSIG = 1


def listen(address: str) -> None:
    """Be a host, for good."""
    from monarch.actor import run_worker_loop_forever

    from titan_rl.mesh.launch.sockets import keep_sockets_in

    os.umask(0o077)
    keep_sockets_in(Path(os.environ["TMPDIR"]))
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def end_with_parent() -> None:
    """The kernel kills this process when its parent dies, if the environment names that."""
    if parent := os.environ.pop(ENDS_WITH, ""):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_parent()
    listen(sys.argv[1])
