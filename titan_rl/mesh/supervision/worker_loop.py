"""``python -m titan_rl.mesh.supervision.worker_loop ADDRESS``: a Monarch host.

Whoever can connect to it may run code as its owner, so it listens at sockets in the run's scratch folder alone, which
is TMPDIR here. The controller stops it: neither Ctrl-C (a process group of its own) nor a closed terminal does.
"""

import os
import signal
import sys
from pathlib import Path

from monarch.actor import run_worker_loop_forever

from titan_rl.mesh.launch.sockets import keep_sockets_in


def listen(address: str) -> None:
    """Be a host, for good."""
    os.umask(0o077)
    keep_sockets_in(Path(os.environ["TMPDIR"]))
    run_worker_loop_forever(address=address, ca="trust_all_connections")


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listen(sys.argv[1])
