"""WebSocket session with an OpenEnv server: one message out, one in.

{"type": "reset", "data": {"seed": 7}}            {"type": "observation", "data": {"observation": {...},
{"type": "step", "data": an action}                                                "reward": 0.0, "done": false}}
{"type": "close"}                                 {"type": "error", "data": {"code": ..., "message": ...}}
"""

import asyncio
import json
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from titan_rl.data.numbers import finite
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import Address, one_line

T = TypeVar("T")
_MAX_BYTES = 16 << 20
"""Of a message."""
_CLOSE_SECONDS = 5.0
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
"""Seconds between two tries to begin."""
_CAPACITY = "CAPACITY_REACHED"


class _Connect(connect):
    """What answers with another address is no server of ours."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _NotYet(Exception):
    """No session has begun: a retry is safe."""


class Refused(Exception):
    """Error reply of the server."""

    def __init__(self, data: Any):
        self.data = data if isinstance(data, dict) else {}
        self.code = str(self.data.get("code", ""))
        super().__init__(one_line(self._details() or self.data.get("message", "") or data))

    def _details(self) -> str:
        """Of an action that does not fit, field by field."""
        errors = self.data.get("errors")
        listed = [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
        return "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in listed)


@dataclass(frozen=True)
class Outcome:
    """Observation, reward and end after a reset or a step."""

    observation: Any
    reward: float | None
    is_done: bool


class Session:
    """Session of one episode. Errors of all calls: EnvironmentFailed."""

    def __init__(self, address: Address, timeout: float, patience: float):
        """``timeout``: seconds for an answer. ``patience``: seconds in which a server that cannot be reached, or that
        has no session free, is asked again."""
        self.address, self.timeout, self.patience = address, timeout, patience
        self._connection: ClientConnection | None = None

    async def begin(self, data: dict[str, Any]) -> Outcome:
        """Connect and reset; retried until a session has begun."""
        loop, delay = asyncio.get_running_loop(), _FIRST_DELAY
        end = loop.time() + self.patience
        while True:
            try:
                return await self._begin(data)
            except _NotYet as error:
                await self.close()
                if loop.time() + delay > end:
                    raise EnvironmentFailed(f"{self.address.url}: {error}") from error
            except Refused as error:
                raise EnvironmentFailed(f"{self.address.url} refused a reset: {error}") from error
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _begin(self, data: dict[str, Any]) -> Outcome:
        """Errors: _NotYet, Refused, EnvironmentFailed."""
        try:
            self._connection = await self._within("a connection", self._connected())
            return await self._ask("reset", data)
        except InvalidStatus as error:
            status = error.response.status_code
            reason = f"the server answered {status}, where a WebSocket was asked for"
            raise (_NotYet(reason) if status >= 500 else EnvironmentFailed(f"{self.address.url}: {reason}")) from error
        except ConnectionClosed as error:
            raise _NotYet(f"the server closed the connection before a session had begun: {error}") from error
        except (OSError, InvalidHandshake, EOFError) as error:
            raise _NotYet(f"no WebSocket: {one_line(error)}") from error
        except Refused as error:
            if error.code != _CAPACITY:
                raise
            raise _NotYet(f"{error}: set task.options.sessions, and verifier.procs, to what it allows") from error

    async def _connected(self) -> ClientConnection:
        return await _Connect(
            self.address.url,
            additional_headers=self.address.headers(),
            proxy=None if self.address.is_loopback else True,
            max_size=_MAX_BYTES,
            open_timeout=None,
            close_timeout=_CLOSE_SECONDS,
            ping_timeout=None,  # the deadlines are ours; pings only keep what lies between awake
        )

    async def step(self, action: Any) -> Outcome:
        """Take an action. Errors: Refused for an error reply; a lost connection is not made again."""
        try:
            return await self._ask("step", action)
        except ConnectionClosed as error:
            raise EnvironmentFailed(f"{self.address.url} was lost in an episode: {one_line(error)}") from error

    async def _ask(self, kind: str, data: Any) -> Outcome:
        """Errors: Refused, EnvironmentFailed, ConnectionClosed."""
        connection = self._connection
        if connection is None:
            raise EnvironmentFailed(f"{self.address.url}: a {kind} without a session")

        async def answer() -> str | bytes:
            with suppress(ConnectionClosed):  # a full server says so and is gone: what it said can still be read
                await connection.send(json.dumps({"type": kind, "data": data}))
            return await connection.recv()

        return self._outcome(kind, await self._within(f"an answer to a {kind}", answer()))

    async def _within(self, label: str, pending: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.timeout):
                return await pending
        except TimeoutError as error:
            message = f"{self.address.url}: {label} did not come within task.options.timeout = {self.timeout:g} s"
            raise EnvironmentFailed(message) from error

    def _outcome(self, kind: str, text: str | bytes) -> Outcome:
        try:
            reply = json.loads(text)
            if reply["type"] == "error":
                raise Refused(reply.get("data"))
            data = reply["data"]
            if reply["type"] != "observation" or not isinstance(data.get("done"), bool | None):
                raise ValueError(one_line(reply))
            return Outcome(data["observation"], _reward(data.get("reward")), bool(data.get("done")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            message = f"{self.address.url} sent an invalid reply to a {kind}: {type(error).__name__}: {one_line(error)}"
            raise EnvironmentFailed(message) from error

    async def close(self) -> None:
        """Close the session, and wait for the server to free it, for five seconds at most."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await connection.send(json.dumps({"type": "close"}))
                await connection.wait_closed()
        connection.transport.abort()


def _reward(value: Any) -> float | None:
    """OpenEnv has rewards that are true or false, too. Errors: ValueError."""
    return None if value is None else float(value) if isinstance(value, bool) else finite(value)
