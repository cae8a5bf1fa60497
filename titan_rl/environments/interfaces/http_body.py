"""Bounded reading of a server's HTTP responses."""

import httpx

from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import one_line

_MAX_BYTES = 16 << 20

AS_IT_IS = {"Accept-Encoding": "identity"}
"""Headers of a request whose answer is read by ``read_body``."""


async def read_body(response: httpx.Response, source: str) -> bytes:
    """Read a streamed response; ``source``: its URL, for errors.

    Errors: EnvironmentFailed for a compressed one, or one of 16 MiB.
    """
    _check_encoding(response, source)
    received = bytearray()
    async for part in response.aiter_raw():
        _add(received, part, source)
    return bytes(received)


def read_body_now(response: httpx.Response, source: str) -> bytes:
    """Read a streamed response, without await; otherwise as ``read_body``."""
    _check_encoding(response, source)
    received = bytearray()
    for part in response.iter_raw():
        _add(received, part, source)
    return bytes(received)


def _check_encoding(response: httpx.Response, source: str) -> None:
    """A few bytes, unpacked twice, are as many as one likes: what was not asked for is not unpacked."""
    if (encoding := response.headers.get("Content-Encoding", "identity")).strip().lower() not in ("", "identity"):
        raise EnvironmentFailed(
            f"{source} answered with Content-Encoding {one_line(encoding)!r}, where identity was asked for: let the "
            f"server send what it says as it is"
        )


def _add(received: bytearray, part: bytes, source: str) -> None:
    received += part
    if len(received) > _MAX_BYTES:
        raise EnvironmentFailed(f"{source} answered with more than {_MAX_BYTES >> 20} MiB")
