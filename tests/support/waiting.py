"""A wait inside an event loop that has a deadline and names what did not happen."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Return once ``condition()`` is true. Errors: AssertionError that names ``what``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.01)
