"""``python outsider.py ADDRESS...``: what a stranger does who knows where a worker loop listens. Prints what he got."""

import os
import socket
import sys

from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint


class Thief(Actor):
    @endpoint
    def take(self) -> str:
        return f"a process of user {os.getuid()} on {socket.gethostname()}"


if __name__ == "__main__":
    enable_transport(f"tcp://{socket.gethostbyname(socket.gethostname())}:0")
    for number, address in enumerate(sys.argv[1:]):
        try:
            mesh = attach_to_workers(ca="trust_all_connections", workers=[address], name=f"found{number}")
            got = mesh.spawn_procs(name=f"p{number}").spawn(f"t{number}", Thief).take.call_one().get(timeout=8)
        except Exception as error:  # Monarch's, by many names
            got = type(error).__name__
        print(f"{address}: {got}", flush=True)
    os._exit(0)
