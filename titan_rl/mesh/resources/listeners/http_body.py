"""Bodies of HTTP requests: so many bytes, within so many seconds."""

import asyncio

from starlette.requests import ClientDisconnect, Request


class Refused(Exception):
    """Request that is refused, with its status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def read_body(request: Request, most_bytes: int, seconds: float, what: str = "a request") -> bytes:
    """Errors: Refused for more than may be sent, or for what does not end in time. ``what``: for its messages."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise Refused(413, f"{what} has at most {most_bytes >> 20} MiB")
    except ClientDisconnect:
        raise Refused(400, "the request was cut short") from None
    except TimeoutError:
        raise Refused(408, f"the request did not end within {seconds:g} seconds") from None
    return bytes(body)
