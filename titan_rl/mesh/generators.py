"""The replicas: a vLLM engine each, of one rank or several. One that dies is replaced while the others go on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.channel.sync import WeightSync, last_line
from titan_rl.config import Config
from titan_rl.mesh.cells import Cell, Cells, call_each
from titan_rl.mesh.router import Router

_MAX_FAILURES = 5
"""Replacements in a row of one replica that never came to serve."""
_PAUSE_SECONDS = 1.0


@dataclass(eq=False)
class Replica:
    """One engine. ``ranks[0]`` answers for all."""

    number: int
    ranks: list[Cell] = field(default_factory=list)

    @property
    def leader(self):
        return self.ranks[0].actor

    def kill(self) -> None:
        for cell in self.ranks:
            cell.kill()


class Generators:
    """Owns the replicas and their spare."""

    def __init__(
        self,
        actor: type,
        cells: Cells,
        config: Config,
        model_path: str,
        max_tokens: int,
        environment: dict[str, str],
        scratch: Path,
        router: Router,
        say: Callable[[str], None],
    ):
        self.cells, self.config, self.router, self.scratch, self.say = cells, config, router, scratch, say
        self._spawn_arguments = environment, actor, config.generator, model_path, max_tokens
        self.replicas: dict[int, Replica] = {}
        self.weights: WeightSync | None = None
        """From the moment on that there is a trainer to take weights from."""
        self._spares: list[Replica] = []
        self._work: set[asyncio.Task] = set()
        self._num_engines = 0

    async def start(self) -> None:
        replicas = await asyncio.gather(*(self._start_one(n) for n in range(self.config.generator.replicas)))
        self.replicas = {replica.number: replica for replica in replicas}
        for replica in replicas:
            self._watch(replica)

    async def _start_one(self, number: int, what: str = "generator") -> Replica:
        count, self._num_engines = self.config.generator.tensor_parallel, self._num_engines + 1
        names = [f"{what} {number}" + (f" rank {rank}" if count > 1 else "") for rank in range(count)]
        spawns = (self.cells.spawn(name, *self._spawn_arguments) for name in names)
        replica = Replica(number, list(await asyncio.gather(*spawns)))
        meeting_file = str(self.scratch / f"generator{self._num_engines}")
        starts = [(cell, (rank, meeting_file)) for rank, cell in enumerate(replica.ranks)]
        await call_each(starts, "start", seconds=self.config.mesh.start_timeout, what=f"starting {what} {number}")
        return replica

    # faults

    def _watch(self, replica: Replica) -> None:
        for cell in replica.ranks:
            cell.on_death.append(lambda cell: self._on_death(replica, cell))
        if dead := [cell for cell in replica.ranks if cell.is_dead]:
            self._on_death(replica, dead[0])

    def _on_death(self, replica: Replica, cell: Cell) -> None:
        """Its other ranks are worth nothing without it."""
        if self.replicas.get(replica.number) is not replica:
            return
        self.router.take_out(replica.number, f"{cell.name} {cell.why}")
        replica.kill()
        del self.replicas[replica.number]
        self.say(f"{cell.name} {cell.why}: its groups are sampled elsewhere, and it is replaced")
        self._in_background(self._replace(replica))

    def _in_background(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _replace(self, old: Replica) -> None:
        """Errors are told to whoever waits for a replica."""
        for cell in old.ranks:
            self.cells.forget(cell)
        for attempt in range(1, _MAX_FAILURES + 1):
            try:
                replica = await self._next_engine(old.number)
                await self._bring_up(replica)
                break
            except Exception as error:  # it is tried again, and in the end whoever waits hears of it
                self.say(f"generator {old.number} could not be replaced: {last_line(error)}")
                if attempt == _MAX_FAILURES:
                    self.router.give_up(old.number, f"its replacements failed, the last with {last_line(error)}")
                    return
        self.replicas[old.number] = replica
        self.router.put_in(old.number)
        self.say(f"generator {old.number} serves again")
        self.cells.tell("generator_serves", number=old.number)
        self._watch(replica)
        self.make_spares()

    async def _next_engine(self, number: int) -> Replica:
        """A spare that waits, or one that is started now."""
        while self._spares:
            replica = self._spares.pop()
            if any(cell.is_dead for cell in replica.ranks):
                continue
            replica.number = number
            for rank, cell in enumerate(replica.ranks):
                cell.name = f"generator {number}" + (f" rank {rank}" if len(replica.ranks) > 1 else "")
            return replica
        return await self._start_one(number)

    async def _bring_up(self, replica: Replica) -> None:
        """To the version that is live. A trainer that is being mended may withdraw it meanwhile: it comes again."""
        for attempt in range(1, _MAX_FAILURES + 1):
            if self.weights is None:
                return
            try:
                return await self.weights.bring_up(replica)
            except Exception:  # the trainer's side may be at fault, which its own owner mends
                if attempt == _MAX_FAILURES or any(cell.is_dead for cell in replica.ranks):
                    replica.kill()
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    def fail(self, number: int, reason: str) -> None:
        """It lives, but cannot be trusted: it is replaced as if it had died."""
        replica = self.replicas.get(number)
        if replica is not None:
            replica.ranks[0].why = f"failed ({reason})"
            replica.kill()

    def make_spares(self) -> None:
        """Have as many loaded engines wait as the config says; each pulls the live version when its turn comes."""

        async def spare() -> None:
            self._spares.append(await self._start_one(0, "spare generator"))

        for _ in range(self.config.recovery.warm_spares - len(self._spares)):
            self._in_background(spare())

    def stop(self) -> None:
        for task in self._work:
            task.cancel()
        self.replicas = {}
