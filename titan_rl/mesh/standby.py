"""A process that waits for somebody to die, with its imports done: most of a start lies behind it when it is needed."""

import asyncio

from titan_rl.config import Config
from titan_rl.mesh.cells import Cell, CellDied, Cells, call


class Standby:
    """Owns at most one waiting process of a kind. Its actor has a ``prepare`` endpoint."""

    def __init__(self, cells: Cells, config: Config, kind: str, *spawn_arguments):
        """``spawn_arguments``: what follows the name in ``Cells.spawn``."""
        self.cells, self.config, self.kind = cells, config, kind
        self._spawn_arguments = spawn_arguments
        self._ready: asyncio.Task[Cell] | None = None

    def make(self) -> None:
        """Begin to prepare one, if one is wanted and there is none yet."""
        if not self.config.recovery.has_standbys or self._ready is not None:
            return
        self._ready = asyncio.ensure_future(self._prepare())
        self._ready.add_done_callback(lambda task: task.cancelled() or task.exception())  # who takes it hears of it

    async def _prepare(self) -> Cell:
        cell = await self.cells.spawn(f"standby {self.kind}", *self._spawn_arguments)
        await call(cell, "prepare", seconds=self.config.mesh.start_timeout, what=f"preparing a standby {self.kind}")
        self.cells.tell("standby_waits", of=self.kind, pid=cell.pid)
        return cell

    async def take(self, name: str) -> Cell:
        """The one that waits, under its new name; a fresh process if there is none. Errors: CellDied; DeadlineError."""
        ready, self._ready = self._ready, None
        if ready is not None:
            try:
                cell = await ready
            except CellDied as error:
                for dead in error.cells:
                    self.cells.forget(dead)
            else:
                if not cell.is_dead:
                    cell.name = name
                    return cell
                self.cells.forget(cell)
        return await self.cells.spawn(name, *self._spawn_arguments)

    def stop(self) -> None:
        if self._ready is not None:
            self._ready.cancel()
