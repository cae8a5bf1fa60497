"""Clients' sessions, and the models and samplers that they have made."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.service.wire.reading import BadRequest

_MOST_SESSIONS = 1000
_GAP_SECONDS = 300.0
"""After which a request no longer waits for one before it that has not come."""


@dataclass
class Model:
    """Adapter that a client trains; its requests are done in the order of their numbers."""

    id: str
    session: str
    rank: int
    next_number: int = 0
    """0 makes the adapter, or loads it."""
    _turns: dict[int, asyncio.Event] = field(default_factory=dict)
    """Of requests that are there: set once all before them have ended."""
    _ended: set[int] = field(default_factory=set)
    """Numbers that were cancelled before their turn."""

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait for a request's turn; the next one comes when the block ends, however it ends.

        Errors: BadRequest for a number whose turn is over, or that waits for one which does not come."""
        if number < self.next_number or number in self._turns or number in self._ended:
            raise BadRequest(f"request {number} of this model came before: give each its own number")
        self._turns[number] = event = asyncio.Event()
        try:
            await self._wait(number, event)
            yield
        finally:
            del self._turns[number]
            self._end(number)

    async def _wait(self, number: int, event: asyncio.Event) -> None:
        while (missing := self.next_number) < number:
            try:
                async with asyncio.timeout(_GAP_SECONDS):
                    await event.wait()
            except TimeoutError:
                if missing == self.next_number and missing not in self._turns:
                    raise BadRequest(
                        f"request {number} waits for {missing}, which was refused or never came: make a new client"
                    ) from None

    def _end(self, number: int) -> None:
        self._ended.add(number)
        while self.next_number in self._ended:
            self._ended.remove(self.next_number)
            self.next_number += 1
        if self.next_number in self._turns:
            self._turns[self.next_number].set()


@dataclass(frozen=True)
class Sampler:
    """Weights that a client samples from."""

    id: str
    folder: Path | None
    """PEFT's; None: the base model."""
    path: str | None = None
    """By which clients name them, if they have a name."""


@dataclass
class Session:
    """A client."""

    id: str
    last_heard: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Clients:
    """Owner of the sessions. Errors of all calls: BadRequest."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}

    def open(self) -> Session:
        if len(self.sessions) >= _MOST_SESSIONS:
            raise BadRequest(f"there are {_MOST_SESSIONS} sessions: end one first")
        session = Session(f"s{secrets.token_hex(8)}")
        self.sessions[session.id] = session
        return session

    def session(self, name: str) -> Session:
        """Session of a name, heard of now."""
        if name not in self.sessions:
            raise BadRequest(f"there is no session {name[:60]!r}")
        session = self.sessions[name]
        session.last_heard = time.monotonic()
        return session

    def model(self, name: str) -> Model:
        session = self.session(name.partition(":")[0])
        if name not in session.models:
            raise BadRequest(f"there is no model {name[:60]!r}")
        return session.models[name]

    def add_model(self, session: Session, number: int, rank: int) -> Model:
        """Model of a session, by its number; the same one if it is asked for again."""
        name = f"{session.id}:train:{number}"
        return session.models.setdefault(name, Model(name, session.id, rank))

    def sampler(self, name: str) -> Sampler:
        session = self.session(name.partition(":")[0])
        if name not in session.samplers:
            raise BadRequest(f"there is no sampling session {name[:60]!r}")
        return session.samplers[name]

    def add_sampler(self, session: Session, number: int, folder: Path | None, path: str | None = None) -> Sampler:
        """Sampler of a session, by its number; the same one if it is asked for again."""
        name = f"{session.id}:sample:{number}"
        return session.samplers.setdefault(name, Sampler(name, folder, path))

    def idle_models(self, seconds: float) -> list[Model]:
        """Models of sessions that have not been heard of for so long."""
        before = time.monotonic() - seconds
        return [
            model
            for session in self.sessions.values()
            if session.last_heard < before
            for model in session.models.values()
        ]

    def end(self, name: str) -> Session:
        """Forget a session; what it had."""
        session = self.session(name)
        del self.sessions[name]
        return session
