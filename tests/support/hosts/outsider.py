"""``python outsider.py ADDRESS...``: what a stranger does who knows where a host, or a worker loop, listens: asks for a
loop without a certificate, then attaches to what was given, or else to that address itself. Prints what he got."""

import json
import os
import socket
import ssl
import sys
import time

from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint


class Thief(Actor):
    @endpoint
    def take(self) -> str:
        return f"a process of user {os.getuid()} on {socket.gethostname()}"


def asked_for(address: str) -> str:
    """A loop, if the host gives one; else the address."""
    scheme, _, place = address.partition("://")
    name, _, port = place.rpartition(":")
    claim = {"run": "mine", "epoch": 99, "number": 0, "controller": "me"}
    try:
        with socket.create_connection((name, int(port)), 5) as stream:
            if scheme == "tls":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                stream = context.wrap_socket(stream)
            stream.settimeout(30)
            stream.sendall(json.dumps(claim).encode() + b"\n")
            return json.loads(stream.makefile().readline())["address"]
    except (OSError, ValueError, KeyError):
        return address


if __name__ == "__main__":
    enable_transport(f"tcp://{socket.gethostbyname(socket.gethostname())}:0")
    asking = {}
    for number, address in enumerate(sys.argv[1:]):
        mesh = attach_to_workers(ca="trust_all_connections", workers=[asked_for(address)], name=f"found{number}")
        asking[address] = mesh.spawn_procs(name=f"p{number}").spawn(f"t{number}", Thief).take.call_one()
    deadline = time.monotonic() + 8
    for address, answer in asking.items():
        try:
            got = answer.get(timeout=max(deadline - time.monotonic(), 0.1))
        except Exception as error:  # Monarch's, by many names
            got = type(error).__name__
        print(f"{address}: {got}", flush=True)
    os._exit(0)
