"""Monarch's ``concurrent_endpoint`` with types, so that calls are checked as those of its ``endpoint`` are."""

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from monarch.actor import concurrent_endpoint as untyped

from titan_rl.compat.monarch.actors import EndpointProperty

P = ParamSpec("P")
R = TypeVar("R")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]:
    """Decorate an async endpoint that runs beside the actor's other work."""
    return untyped(method)
