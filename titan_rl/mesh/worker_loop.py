"""``python -m titan_rl.mesh.worker_loop ADDRESS CONTROLLER``: a Monarch host, for as long as its controller lives."""

import os
import select
import sys
import threading

from monarch.actor import run_worker_loop_forever


def _end_with(pid: int) -> None:
    """Errors: ProcessLookupError if it is gone already."""
    descriptor = os.pidfd_open(pid)

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="controller's death", daemon=True).start()


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")  # a socket file that only we may open
