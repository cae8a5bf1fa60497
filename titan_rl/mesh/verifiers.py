"""The verifier processes. One that dies is replaced, and its groups are sampled by another."""

import asyncio
from collections.abc import Callable

from titan_rl.config import Config
from titan_rl.mesh.cells import Cell, Cells, call
from titan_rl.mesh.router import Router

_MAX_FAILURES = 5


class Verifiers:
    """Owns the verifier cells; each has a scorer process below it."""

    def __init__(
        self,
        actor: type,
        cells: Cells,
        config: Config,
        model_path: str,
        environment: dict[str, str],
        router: Router,
        say: Callable[[str], None],
    ):
        self.cells, self.config, self.router, self.say = cells, config, router, say
        self._spawn_arguments = environment, actor, config, model_path
        self.procs: dict[int, Cell] = {}
        self.scorers: dict[int, int] = {}
        """Id of each verifier's scorer process."""
        self._work: set[asyncio.Task] = set()

    async def start(self) -> None:
        await asyncio.gather(*(self._start_one(number) for number in range(self.config.verifier.procs)))

    async def _start_one(self, number: int) -> None:
        cell = await self.cells.spawn(f"verifier {number}", *self._spawn_arguments)
        seconds = self.config.mesh.start_timeout
        self.scorers[number] = await call(cell, "start", seconds=seconds, what=f"starting verifier {number}")
        self.procs[number] = cell
        cell.on_death.append(lambda cell: self._on_death(number, cell))
        if cell.is_dead:
            self._on_death(number, cell)

    def _on_death(self, number: int, cell: Cell) -> None:
        if self.procs.get(number) is not cell:
            return
        self.router.take_out(number, f"{cell.name} {cell.why}")
        del self.procs[number]
        self.cells.forget(cell)
        self.say(f"{cell.name} {cell.why}: its groups are sampled again, and it is replaced")
        task = asyncio.ensure_future(self._replace(number))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _replace(self, number: int) -> None:
        for attempt in range(1, _MAX_FAILURES + 1):
            try:
                await self._start_one(number)
            except Exception as error:  # it is tried again, and in the end whoever waits hears of it
                self.say(f"verifier {number} could not be replaced: {error}")
                if attempt == _MAX_FAILURES:
                    self.router.give_up(number, f"its replacements failed, the last with {error}")
            else:
                self.router.put_in(number)
                self.cells.tell("verifier_serves", number=number)
                return

    def stop(self) -> None:
        for task in self._work:
            task.cancel()
        self.procs = {}
