"""A process that waits for somebody to die, with its imports done: most of a start lies behind it when it is needed."""

import asyncio

from titan_rl.config.schema import Config
from titan_rl.mesh.supervision.actor_process import Cell, CellDied, Cells
from titan_rl.mesh.supervision.calls import call


class Standby:
    """Owns at most one waiting process of a kind. Its actor has a ``prepare`` endpoint."""

    def __init__(self, cells: Cells, config: Config, kind: str, *spawn_arguments):
        """``spawn_arguments``: what follows the name in ``Cells.spawn``."""
        self.cells, self.config, self.kind = cells, config, kind
        self._spawn_arguments = spawn_arguments
        self._ready: asyncio.Task[Cell] | None = None
        self._has_begun = False

    def make(self) -> None:
        """Begin to prepare one, if one is wanted and there is none yet."""
        if not self.config.recovery.has_standbys or (self._ready is not None and not self._is_lost()):
            return
        self._has_begun = False
        self._ready = asyncio.ensure_future(self._prepare())
        self._ready.add_done_callback(lambda task: task.cancelled() or task.exception())  # who takes it hears of it

    async def _prepare(self) -> Cell:
        seconds, what = self.config.mesh.start_timeout, f"preparing a standby {self.kind}"
        async with self.cells.preparing:  # one kind after the other: whoever is asked for first is ready first
            self._has_begun = True
            cell = await self.cells.spawn(f"standby {self.kind}", *self._spawn_arguments)
            await call(cell, "prepare", seconds=seconds, what=what)
        self.cells.tell("standby_waits", of=self.kind, pid=cell.pid)
        cell.on_death.append(self._on_death)
        return cell

    def _on_death(self, cell: Cell) -> None:
        """Another one, if this one was still waiting."""
        if self._ready is not None and self._ready.done() and self._is_lost():
            self.cells.forget(cell)
            self.make()

    async def take(self, name: str) -> Cell:
        """The one that waits, under its new name; a fresh process if there is none. Errors: CellDied; DeadlineError."""
        ready, self._ready = self._ready, None
        if ready is not None and not self._has_begun:
            ready.cancel()
        elif ready is not None:
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

    def _is_lost(self) -> bool:
        """It died while it was waiting, or before."""
        if not self._ready.done():
            return False
        return self._ready.cancelled() or self._ready.exception() is not None or self._ready.result().is_dead

    def stop(self) -> None:
        if self._ready is not None:
            self._ready.cancel()
