"""Limit of concurrent episodes of a task in a verifier process, first come first served.

A task that has ``sessions`` is played so (group.py). With several verifiers each has as many of its own.
"""

import asyncio

from titan_rl.environments.interfaces.environment import EnvironmentFailed


class Sessions:
    """Semaphore for episodes, entered by ``async with``.

    Errors: EnvironmentFailed if no session is free within ``seconds``: an unplayed episode is no wrong answer.
    """

    def __init__(self, limit: int, seconds: float):
        self.limit, self.seconds = limit, seconds
        self._free = asyncio.Semaphore(limit)

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await self._free.acquire()
        except TimeoutError:
            raise EnvironmentFailed(
                f"no session was free within {self.seconds:g} s: raise task.options.sessions = {self.limit}, with the "
                f"server's own limit; or session_timeout, with verifier.episode_timeout; or ask for less at once"
            ) from None

    async def __aexit__(self, *failure: object) -> None:
        self._free.release()
