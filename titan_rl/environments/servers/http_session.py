"""HTTP session of one episode: JSON requests, JSON or text replies, and cookies."""

import asyncio
import json
import ssl
from functools import lru_cache
from typing import Any

import httpx

from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.http_body import AS_IT_IS, read_body
from titan_rl.environments.interfaces.server_address import Address, one_line

_LATER = (408, 425, 429)
"""Of the 4xx those that find fault with the moment alone."""
_CLOSE_SECONDS = 5.0
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
"""Seconds between two tries to begin."""


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Once, since they take milliseconds to read."""
    return httpx.create_ssl_context()


class Unavailable(EnvironmentFailed):
    """Server unreachable, or failed (5xx): the request itself is valid."""


class HttpSession:
    """Session with one server. Errors of all calls: EnvironmentFailed."""

    def __init__(self, address: Address, timeout: float | None):
        """``timeout``: seconds for an answer, however slowly it comes; None: the caller has a deadline of its own."""
        self.address, self.timeout = address, timeout
        self._client: httpx.AsyncClient | None = None

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self.address.headers(),
                trust_env=not self.address.is_loopback,
                verify=_certificates() if self.address.parts.scheme == "https" else False,
                timeout=None,
                follow_redirects=False,
            )
        return self._client

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Post JSON; gives status and text of a success, or of a refusal (4xx)."""
        source = f"{self.address.url}/{path}"
        try:
            async with asyncio.timeout(self.timeout):
                status, text = await self._read(path, body)
        except TimeoutError as error:
            message = f"{source} did not answer within task.options.timeout = {self.timeout:g} s"
            raise EnvironmentFailed(message) from error
        except httpx.HTTPError as error:
            raise Unavailable(f"{source}: {type(error).__name__}: {one_line(error)}") from error
        if status >= 500 or status in _LATER:
            raise Unavailable(f"{source} answered {status}: {one_line(text)}")
        if not 200 <= status < 300 and not 400 <= status < 500:
            raise EnvironmentFailed(f"{source} answered {status}: redirects are not followed")
        return status, text

    async def _read(self, path: str, body: Any) -> tuple[int, str]:
        url = f"{self.address.url.rstrip('/')}/{path}"
        content, about = json.dumps(body).encode(), AS_IT_IS | {"Content-Type": "application/json"}
        async with self._open().stream("POST", url, content=content, headers=about) as response:
            return response.status_code, (await read_body(response, url)).decode("utf-8", "replace")

    async def post_until_up(self, path: str, body: Any, patience: float) -> tuple[int, str]:
        """Post an idempotent request, again while the server is unavailable, for ``patience`` seconds."""
        loop, delay = asyncio.get_running_loop(), _FIRST_DELAY
        end = loop.time() + patience
        while True:
            try:
                return await self.post(path, body)
            except Unavailable:
                if loop.time() + delay > end:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await client.aclose()


def read_object(source: str, text: str) -> dict[str, Any]:
    """Parse a JSON object. Errors: EnvironmentFailed for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"{source} answered with no JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise EnvironmentFailed(f"{source} answered with no JSON object: {one_line(text)}")
    return value
