"""``titan-rl host ADDRESS``: this machine becomes a host of a run, until the run's controller is gone.

    this process ──starts──▶ worker loop (Monarch) ◀──attaches── controller
         │                        └──starts──▶ agent (agent.py), which ends when the run does, or its lease
         └── waits for whichever of the two ends first, then ends all, and removes what they left

It needs no Monarch itself, so what it sees to does not depend on it. Whoever can attach to the worker loop runs code
as its owner: it takes ``tls://`` with a certificate of the run's authority, and plain ``tcp://`` only if that is asked
for.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from titan_rl.config.hosts import Address, parse_address
from titan_rl.config.load import ConfigError
from titan_rl.mesh.launch.announcing import Announcer, free_port
from titan_rl.mesh.launch.certificates import VARIABLES, complete, use_certificates
from titan_rl.mesh.launch.scratch import make_scratch, remove_scratch
from titan_rl.mesh.supervision import processes
from titan_rl.mesh.supervision.worker_loop import AGENT_FILE, ENDS_WITH

DELIVERY = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "10m", "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "60s"}
"""An address that was silent for longer than the first is dead to a process for good; a process that has not heard of
its controller for the second ends, if its agent has not ended it before."""
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0


def be_host(
    address: str, *, certificates: str = "", wait: float = 600.0, insecure: bool = False, announce: int = 0
) -> int:
    """The exit code: 0 when a run was served and is over, 1 if none came within ``wait`` seconds or the worker loop
    died. ``announce``: a port at which it is told where the worker loop listens, until a run has come (announcing.py).
    Errors: ConfigError before anything starts."""
    address, environment = checked_address(address, insecure=insecure), dict(os.environ)
    scratch = make_scratch()
    try:
        if address.scheme == "tls":
            own = complete(certificates, address.host, scratch / "certificates")
            use_certificates(own, address.host, environment, f"titan-rl host {address}")
        address = address if address.port else address._replace(port=free_port(address.host))
        if announce:
            files = tuple(environment[key] for key in VARIABLES) if address.scheme == "tls" else None
            Announcer(address, announce, files, is_free=lambda: not (scratch / AGENT_FILE).exists()).start()
        return _be_host(address, environment, scratch, wait)
    finally:
        remove_scratch(scratch)


def _be_host(address: Address, environment: dict[str, str], scratch: Path, wait: float) -> int:
    mark = processes.new_mark()
    environment |= DELIVERY | mark | {"TMPDIR": str(scratch), ENDS_WITH: str(os.getpid())}
    command = [sys.executable, "-m", "titan_rl.mesh.supervision.worker_loop", str(address)]
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    loop = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    print(
        f"titan-rl host: listening at {address} (process {loop.pid}), for a run to come within {wait:g} s", flush=True
    )
    try:
        code, why = _serve(loop, scratch / AGENT_FILE, wait, asked)
        print(f"titan-rl host: {why}", flush=True)
        return code
    finally:
        for _ in processes.ending(mark, _END_SECONDS):
            time.sleep(0.02)
        loop.wait()


def checked_address(address: str, *, insecure: bool) -> Address:
    """With this machine's name, if it has none. Errors: ConfigError."""
    try:
        found = parse_address(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found.scheme == "tcp" and not insecure:
        raise ConfigError(
            f"{address}: whoever reaches a tcp:// port runs code as its owner: use tls://, or, where nobody else can "
            f"reach it, say so (--insecure; hosts.insecure = true)"
        )
    return found._replace(name=found.name or socket.gethostname())


def _serve(loop: subprocess.Popen, agent_file: Path, wait: float, asked: list[int]) -> tuple[int, str]:
    """Until there is nothing more to serve: the exit code, and why."""
    deadline, agent = time.monotonic() + wait, None
    while not asked:
        if loop.poll() is not None:
            return 1, f"the worker loop has ended with {loop.returncode}"
        if agent is None:
            agent = _agent(agent_file)
            if agent is None and time.monotonic() > deadline:
                return 1, f"no run has come within {wait:g} s"
        with suppress(InterruptedError):
            if select.select([agent] if agent is not None else [], [], [], _POLL_SECONDS)[0]:
                return 0, "the run is over, or has not been heard of for too long"
    return 128 + asked[0], "it was told to end"


def _agent(file: Path) -> int | None:
    """A descriptor of the agent's process, once a run has come."""
    with suppress(FileNotFoundError, ValueError):
        return os.pidfd_open(int(file.read_text()))
    return None
