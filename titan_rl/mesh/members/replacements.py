"""Replacing in the background: tried a few times, then given up, which those who wait for it are told."""

from collections.abc import Awaitable, Callable

from titan_rl.mesh.members.router import Router
from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.supervision.actor_process import last_line

_MAX_ATTEMPTS = 5


class Replacements:
    """Owns the replacements of one kind that are under way."""

    def __init__(self, router: Router, say: Callable[[str], None]):
        self.router, self.say = router, say
        self._background = BackgroundTasks()

    def begin(self, number: int, replace: Callable[[], Awaitable[None]]) -> None:
        """Have ``replace`` bring a number back into the router."""
        self._background.start(self._try(number, replace))

    async def _try(self, number: int, replace: Callable[[], Awaitable[None]]) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if number not in self.router.members:  # it was taken away meanwhile
                return
            try:
                return await replace()
            except Exception as error:  # it is tried again, and in the end those who wait are told
                self.say(f"{self.router.kind} {number} could not be started: {last_line(error)}")
                if attempt == _MAX_ATTEMPTS:
                    self.router.give_up(number, f"its replacements failed, the last with {last_line(error)}")

    def stop(self) -> None:
        self._background.cancel()
