"""Typed remote calls as values: a stub has an endpoint's signature and returns the call.

    class TrainerEndpoints:
        @stub
        def stage(self, version: int, epoch: int = 0) -> None: ...

    await call(process, TrainerEndpoints.stage(7), seconds=60, what="staging")

The mesh may not import the actors' classes. That stubs and endpoints agree is a test
(tests/mesh/processes/test_calls.py)."""

import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import cloudpickle

if TYPE_CHECKING:  # it needs torch
    from titan_rl.mesh.channel.memory.region import RegionHandle

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class RemoteCall(Generic[R_co]):
    """Call of an endpoint: its name and arguments."""

    endpoint: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def at(self, actor: Any, here: Callable[[Any], Any] = lambda argument: argument) -> Awaitable[R_co]:
        """Make the call at an actor. ``here``: what each argument is there (``Host.here``)."""
        keywords = {name: here(value) for name, value in self.keywords.items()}
        return getattr(actor, self.endpoint).call_one(*map(here, self.arguments), **keywords)


class stub(Generic[P, R]):
    """Decorator of a method that stands for an endpoint: called, it gives a ``RemoteCall``."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]):
        self.method = method

    @property
    def name(self) -> str:
        return self.method.__name__

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> RemoteCall[R]:
        return RemoteCall(self.name, arguments, keywords)


def reference_to(actor: Any) -> bytes:
    """Reference to an actor, for another actor (``actor_of``)."""
    return cloudpickle.dumps(actor)


@lru_cache(maxsize=64)
def actor_of(reference: bytes) -> Any:
    """Actor that a reference names."""
    return pickle.loads(reference)


class PreparedEndpoints:
    """Endpoints of an actor that can be a standby."""

    @stub
    def prepare(self) -> None: ...


class SidecarEndpoints:
    """Endpoints of ``Sidecar``."""

    @stub
    def start(self, logs: str | None, name: str) -> int: ...

    @stub
    def open_store(self, address: str) -> str: ...

    @stub
    def end_collectives(self, lost: str = "") -> bool: ...

    @stub
    def keep(self, handle: "RegionHandle") -> None: ...

    @stub
    def kept(self, rank: int) -> "tuple[list[int], RegionHandle | None]": ...
