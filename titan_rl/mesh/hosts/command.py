"""``titan-rl host ADDRESS``: this machine becomes a host, for one run after another.

    reception (claims.py) ◀──claim── controller                      this process, and what it begins once:
        └──starts──▶ worker loop (Monarch) ◀──attaches── controller      fork servers, which do imports ahead
                         └──starts──▶ agent (agent.py), which ends when the run does, or its lease

When the agent or the loop ends, all that ran there is ended and removed, and the next run may come. It needs no Monarch
itself, so what it sees to does not depend on it. Whoever can attach to a worker loop runs code as its owner: both ports
ask for a certificate of the run's authority, and plain ``tcp://`` is taken only if that is asked for.
"""

import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import Address, parse_address
from titan_rl.mesh.forking import forking
from titan_rl.mesh.hosts.service import HostService
from titan_rl.mesh.launch.claims import Caller, Claim, ClaimListener
from titan_rl.mesh.resources.certificates import VARIABLES, complete, use_certificates
from titan_rl.mesh.resources.cores import fork_environment
from titan_rl.mesh.resources.open_files import raise_open_files
from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch

MONARCH = {
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "10m",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "60s",
}
"""An address that was silent for longer than the first is dead to a process for good; a process that has not heard of
its controller for the second ends, if its agent has not ended it before."""
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.1


def be_host(
    address: str, *, certificates: str = "", wait: float = WAIT_SECONDS, insecure: bool = False, once: bool = False
) -> int:
    """The exit code: 128 and the signal that ended it. ``once``: for a single run, 0 when that is over, and 1 if none
    came within ``wait`` seconds or its worker loop died. Errors: ConfigError before anything starts."""
    own, environment = checked_address(address, insecure=insecure), dict(os.environ)
    files = None
    if own.scheme == "tls":
        folder = complete(certificates, own.host, aside=True)
        use_certificates(folder, own.host, environment, f"titan-rl host {own}")
        certificate, key, authority = (environment[name] for name in VARIABLES)
        files = certificate, key, authority
    raised = raise_open_files()
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        listener = ClaimListener(own, files)
    except OSError as error:
        raise ConfigError(f"titan-rl host cannot listen at {own}: {error.strerror or error}") from None
    with closing(listener), _forks(environment) as forks:
        waiting = f", for a run to come within {wait:g} s" if once else ""
        if raised:
            say(f"titan-rl host: {raised}")
        say(f"titan-rl host: listening at {own} (process {os.getpid()}){waiting}")
        server = HostServer(own, environment | MONARCH | forks)
        code, why = _serve(server, listener, signals, wait if once else None)
        say(f"titan-rl host: {why}")
        return code


def checked_address(address: str, *, insecure: bool) -> Address:
    """Parsed address, with this machine's name as default. Errors: ConfigError."""
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if parsed.scheme == "tcp" and not insecure:
        raise ConfigError(
            f"{address}: whoever reaches a tcp:// port runs code as its owner: use tls://, or, where nobody else can "
            f"reach it, say so (--insecure; hosts.insecure = true)"
        )
    return parsed._replace(name=parsed.name or socket.gethostname())


@contextmanager
def _forks(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Fork servers for all runs to come, and how their processes find them; nothing where there can be none.

    A kind of actor that no run places here is not imported: vLLM alone takes half a GiB.
    """
    if os.path.isdir(os.environ.get(forking.FORK_SERVERS, "")) or not forking.can_fork_here():
        yield {}
        return
    folder = make_scratch()
    servers = forking.start(folder, {**environment, **fork_environment(), **forking.no_mark()}, None, at_once=())
    try:
        yield {forking.FORK_SERVERS: str(folder)}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(servers.pid, signal.SIGKILL)
        assert servers.stdin is not None  # ``start`` pipes it
        servers.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            servers.wait(5)
        remove_scratch(folder)


class HostServer:
    """Server of a host: one run at a time, with the latest claim of each run."""

    def __init__(self, address: Address, environment: Mapping[str, str]):
        self._address, self._environment = address, environment
        self.now: HostService | None = None
        self._latest: dict[str, Claim] = {}
        """Of each run that was ever served."""

    def answer(self, caller: Caller) -> None:
        """Answer a claim with a worker loop, or refuse it."""
        claim, now = caller.claim, self.now
        latest = self._latest.get(claim.run)
        if now is not None and claim == now.claim:  # its answer was lost
            caller.give(now.address())
        elif latest is not None and not claim.supersedes(latest):
            caller.refuse(f"a later controller of this run has come to {self._address}: this one is over", is_over=True)
        elif now is not None and now.claim.run != claim.run:
            caller.refuse("it serves another run, until that is over", is_over=False)
        else:
            self._begin(caller)

    def _begin(self, caller: Caller) -> None:
        self.end()
        self._latest[caller.claim.run] = caller.claim
        try:
            self.now = HostService(self._address, self._environment, caller.claim)
        except OSError as error:
            return caller.refuse(f"no worker loop can be started: {error}", is_over=False)
        if address := self.now.address():
            caller.give(address)
        else:
            self.end()
            del self._latest[caller.claim.run]
            caller.refuse("its worker loop did not come up", is_over=False)

    def end(self) -> None:
        if self.now is not None:
            self.now.end()
            self.now = None


def _serve(server: HostServer, listener: ClaimListener, signals: list[int], wait: float | None) -> tuple[int, str]:
    """Until it is told to end: the exit code, and why. ``wait``: seconds for the one run that is to be served."""
    deadline = float("inf") if wait is None else time.monotonic() + wait
    try:
        while not signals:
            with suppress(queue.Empty):
                server.answer(listener.callers.get(timeout=_POLL_SECONDS))
            if server.now is None:
                if time.monotonic() > deadline:
                    return 1, f"no run has come within {wait:g} s"
            elif why := server.now.why_over():
                server.end()
                if wait is not None:
                    return int("worker loop" in why), f"the run: {why}"
                say(f"titan-rl host: the run: {why}; the next may come")
        return 128 + signals[0], "it was told to end"
    finally:
        server.end()
