"""``python -m titan_rl.mesh.supervision.worker_loop ADDRESS``: a Monarch host."""

import sys

from monarch.actor import run_worker_loop_forever

if __name__ == "__main__":
    run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")  # a socket file that only we may open
