"""Where a host is asked for a worker loop: the one port of ``titan-rl host`` that a run's configuration names.

    controller ──certificate, claim──▶ reception ──▶ a new worker loop at a new port, for this controller alone
                                          └────────▶ or why not: another run is served; or the claim is over

A claim names a run, its epoch (how often the run was begun or resumed), and its number within that. A later claim of
the same run goes over the earlier one, whose processes are ended first; one that is not later is over, for good. So
neither a controller that was believed dead, nor a request that was long on its way, gets anything here. Each loop is a
new one at a new port, since Monarch takes an address for its first process.
"""

import asyncio
import json
import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from titan_rl.config.sections.hosts import Address
from titan_rl.mesh.channel.tcp.pending_connections import BACKLOG, PendingConnections
from titan_rl.mesh.channel.tcp.security import accepted, client_context
from titan_rl.mesh.processes.deadlines import DeadlineError, within

_MOST_BYTES = 4096
"""Of a claim, and of an answer to it."""
_CLAIM_SECONDS, _ASK_SECONDS, _ANSWER_SECONDS = 5.0, 10.0, 60.0
"""How long a stranger may be silent before he has said who he is; a host, before it takes a connection; and before it
answers a claim."""
_AGAIN_SECONDS = 1.0


class ClaimSuperseded(RuntimeError):
    """Claim superseded by a later controller of the run."""


@dataclass(frozen=True)
class Claim:
    """Claim of a controller to a host."""

    run: str
    epoch: int
    number: int
    """Grows within an epoch."""
    controller: str
    """A name that no other controller has."""

    def supersedes(self, other: "Claim") -> bool:
        return (self.epoch, self.number) > (other.epoch, other.number)


def read_claim(line: bytes) -> Claim:
    """Claim of a line of JSON. Errors: ValueError."""
    try:
        claim = Claim(**json.loads(line))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    texts, numbers = (claim.run, claim.controller), (claim.epoch, claim.number)
    if not all(isinstance(text, str) and text for text in texts) or any(type(number) is not int for number in numbers):
        raise ValueError(f"{claim} is not a claim")
    return claim


# the host's side


class Caller:
    """Controller that waits for an answer to its claim."""

    def __init__(self, claim: Claim, stream: socket.socket):
        self.claim, self._stream = claim, stream

    def give(self, address: str) -> None:
        self._answer(address=address)

    def refuse(self, why: str, *, is_over: bool) -> None:
        self._answer(refused=why, is_over=is_over)

    def _answer(self, **fields: str | bool) -> None:
        with suppress(OSError), self._stream:  # it did not wait, and will ask again
            self._stream.sendall(json.dumps(fields).encode() + b"\n")


class ClaimListener:
    """Listener for claims. Callers are queued for the main thread; handshakes run in other threads."""

    def __init__(self, address: Address, files: tuple[str, str, str] | None):
        """``files``: certificate, key and authority; None: whoever comes is let in. Errors: OSError."""
        family, *_ = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        self._files = files
        self.callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        self._strangers = PendingConnections(listener, self._meet, "stranger")

    def close(self) -> None:
        """Stop listening."""
        self._strangers.close()

    def _meet(self, connection: socket.socket, on_known: Callable[[], None]) -> None:
        try:
            connection.settimeout(_CLAIM_SECONDS)
            stream = accepted(connection, self._files)
            with stream.makefile("rb") as lines:
                self.callers.put(Caller(read_claim(lines.readline(_MOST_BYTES)), stream))
        except (OSError, ValueError):
            connection.close()
        finally:
            on_known()


# the controller's side


async def ask_for_loop(address: Address, claim: Claim, log: Callable[[str], None]) -> str:
    """Claim a worker loop; its address, once the host is reachable and free.

    ``log``: receives the reason of each refusal. Errors: ClaimSuperseded; ValueError without a certificate.
    """
    while True:
        try:
            answer = await within(_ANSWER_SECONDS, f"an answer of {address}", _ask(address, claim))
        except (OSError, EOFError, ValueError, DeadlineError):  # nothing listens there (yet), or it is no host
            answer = {}
        if isinstance(loop := answer.get("address"), str):
            return loop
        if answer.get("is_over"):
            raise ClaimSuperseded(str(answer.get("refused")))
        if answer:
            log(f"{address}: {answer.get('refused')}")
        await asyncio.sleep(_AGAIN_SECONDS)


async def _ask(address: Address, claim: Claim) -> dict:
    """Errors: OSError; EOFError; ValueError."""
    opening = asyncio.open_connection(address.host, address.port, ssl=client_context(address.scheme == "tls"))
    reader, writer = await within(_ASK_SECONDS, f"a connection to {address}", opening)
    try:
        writer.write(json.dumps(asdict(claim)).encode() + b"\n")
        await writer.drain()
        answer = json.loads(await reader.readuntil(b"\n"))
        if not isinstance(answer, dict):
            raise ValueError(f"{address} says {answer!r}")
        return answer
    except asyncio.LimitOverrunError as error:
        raise ValueError(str(error)) from None
    finally:
        writer.close()


async def until_it_listens(address: Address) -> None:
    """Wait until the address accepts connections."""
    while True:
        with suppress(OSError, DeadlineError):
            opening = asyncio.open_connection(address.host, address.port)
            _, writer = await within(_ASK_SECONDS, f"a connection to {address}", opening)
            return writer.close()
        await asyncio.sleep(_AGAIN_SECONDS)
