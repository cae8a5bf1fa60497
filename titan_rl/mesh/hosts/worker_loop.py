"""``python -m titan_rl.mesh.hosts.worker_loop ADDRESS``: a Monarch host.

Whoever can connect to it may run code as its owner, so its sockets are in the run's scratch folder alone, which is
TMPDIR here; what listens beyond this machine asks for a certificate (command.py). The controller stops it, or the
process that started it: neither Ctrl-C (a process group of its own) nor a closed terminal does.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from titan_rl.data.storage.files import replace_text

AGENT_FILE = "agent.pid"
"""In TMPDIR: the id of the agent's process, once a run has attached (agent.py)."""
ADDRESS_FILE = "loop.address"
"""In TMPDIR: where a loop listens that has an identity of its own (service.py)."""
ENDS_WITH = "TITAN_RL_HOST_PROCESS"
"""Environment variable: the id of the process with which this one ends."""
_PR_SET_PDEATHSIG = 1


def listen(address: str) -> None:
    """Run a worker loop at an address, forever."""
    from monarch.actor import run_worker_loop_forever

    from titan_rl.mesh.resources.listeners.sockets import keep_sockets_in

    os.umask(0o077)
    keep_sockets_in(Path(os.environ["TMPDIR"]))
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def listen_anew(address: str) -> None:
    """Run a worker loop under a new identity."""
    from monarch.job import new_service_proc_id, service_proc_addr

    address = service_proc_addr(address, new_service_proc_id())
    replace_text(Path(os.environ["TMPDIR"], ADDRESS_FILE), address)
    listen(address)


def end_with_parent() -> bool:
    """Whether the environment names a parent: then the kernel kills this process when that dies."""
    parent = os.environ.pop(ENDS_WITH, "")
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(1)
    return bool(parent)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    (listen_anew if end_with_parent() else listen)(sys.argv[1])
