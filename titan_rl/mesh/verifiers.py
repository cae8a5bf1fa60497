"""The verifier processes. One that dies is replaced, and its groups are sampled by another."""

import asyncio
from collections.abc import Callable

from titan_rl.config.schema import Config
from titan_rl.mesh.replacements import Replacements
from titan_rl.mesh.router import Router
from titan_rl.mesh.supervision.actor_process import Cell, Cells
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.supervision.standby import Standby


class Verifiers:
    """Owns the verifier cells; each has a scorer process below it."""

    def __init__(
        self,
        actor: type,
        cells: Cells,
        config: Config,
        model_path: str,
        environment: dict[str, str],
        say: Callable[[str], None],
    ):
        self.cells, self.config, self.say = cells, config, say
        self.router = Router("verifier", range(config.verifier.procs))
        self.procs: dict[int, Cell] = {}
        self.scorers: dict[int, int] = {}
        """Id of the scorer process that each verifier began with."""
        self.standby = Standby(cells, config, "verifier", environment, actor, config, model_path)
        self._replacements = Replacements(self.router, say)

    async def start(self) -> None:
        await asyncio.gather(*(self._start_one(number) for number in range(self.config.verifier.procs)))

    async def _start_one(self, number: int) -> None:
        cell = await self.standby.take(f"verifier {number}")
        seconds = self.config.mesh.start_timeout
        try:
            self.scorers[number] = await call(cell, "start", seconds=seconds, what=f"starting verifier {number}")
        except BaseException:  # cancelled included: nobody else knows of it yet
            cell.kill()
            self.cells.forget(cell)
            raise
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
        self._replacements.begin(number, lambda: self._replace(number))

    async def _replace(self, number: int) -> None:
        await self._start_one(number)
        self.router.put_in(number)
        self.cells.tell("verifier_serves", number=number)
        self.standby.make()

    def stop(self) -> None:
        self._replacements.stop()
        self.standby.stop()
        self.procs = {}
