"""The replicas: a vLLM engine each, of one rank or several. One that dies is replaced while the others go on.

Their number may change while the run goes on: one more is brought up to the live version before it gets any work,
one less ends what it has been given.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.config.schema import Config
from titan_rl.mesh.replacements import Replacements
from titan_rl.mesh.router import Router
from titan_rl.mesh.supervision.actor_process import Cell, Cells
from titan_rl.mesh.supervision.calls import call_each
from titan_rl.mesh.supervision.standby import Standby
from titan_rl.mesh.weight_sync import WeightSync

_MAX_BRING_UPS = 5
_PAUSE_SECONDS = 1.0


@dataclass(eq=False)
class Replica:
    """One engine. ``ranks[0]`` answers for all."""

    number: int
    ranks: list[Cell] = field(default_factory=list)
    num_groups: int = 0
    """That it is working on."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def leader(self):
        return self.ranks[0].actor

    @property
    def is_dead(self) -> bool:
        return any(cell.is_dead for cell in self.ranks)

    def __enter__(self) -> None:
        self.num_groups += 1
        self.idle.clear()

    def __exit__(self, *_) -> None:
        self.num_groups -= 1
        if not self.num_groups:
            self.idle.set()

    def kill(self) -> None:
        for cell in self.ranks:
            cell.kill()


def _rank_names(number: int | str, count: int) -> list[str]:
    return [f"generator {number}" + (f" rank {rank}" if count > 1 else "") for rank in range(count)]


class Generators:
    """Owns the replicas and their spares."""

    def __init__(
        self,
        actor: type,
        cells: Cells,
        config: Config,
        model_path: str,
        max_tokens: int,
        environment: dict[str, str],
        scratch: Path,
        say: Callable[[str], None],
    ):
        self.cells, self.config, self.scratch, self.say = cells, config, scratch, say
        self.router = Router("generator", range(config.generator.replicas))
        self.replicas: dict[int, Replica] = {}
        self.weights: WeightSync | None = None
        """From the moment on that there is a trainer to take weights from."""
        self.changed: Callable[[], None] = lambda: None
        """Hears of every replica that comes or goes."""
        arguments = environment, actor, config.generator, model_path, max_tokens
        self.standby = Standby(cells, config, "generator", *arguments)
        self._spares: list[Replica] = []
        self._num_spares_coming = 0
        self._replacements = Replacements(self.router, say)
        self._work: set[asyncio.Task] = set()
        self._num_engines = 0

    @property
    def healthy(self) -> list[Replica]:
        """Those that may get work."""
        return [self.replicas[number] for number in self.router.healthy if number in self.replicas]

    @property
    def leaders(self) -> list[Cell]:
        return [replica.ranks[0] for replica in self.replicas.values()]

    async def start(self) -> None:
        replicas = await asyncio.gather(*(self._start_one(n) for n in self.router.members))
        for replica in replicas:
            self._take_in(replica)

    async def _start_one(self, number: int | str) -> Replica:
        self._num_engines += 1
        meeting_file = str(self.scratch / f"generator{self._num_engines}")
        names = _rank_names(number, self.config.generator.tensor_parallel)
        ranks = list(await asyncio.gather(*(self.standby.take(name) for name in names)))
        replica = Replica(-1 if isinstance(number, str) else number, ranks)
        starts = [(cell, (rank, meeting_file)) for rank, cell in enumerate(ranks)]
        what = f"starting generator {number}"
        try:
            await call_each(starts, "start", seconds=self.config.mesh.start_timeout, what=what)
        except BaseException:  # cancelled included: nobody else knows of it yet
            self._end(replica)
            raise
        return replica

    def _take_in(self, replica: Replica) -> None:
        self.replicas[replica.number] = replica
        for cell in replica.ranks:
            cell.on_death.append(lambda cell: self._on_death(replica, cell))
            cell.on_death.append(lambda cell: self.changed())
        if dead := [cell for cell in replica.ranks if cell.is_dead]:
            self._on_death(replica, dead[0])
        self.changed()

    def _end(self, replica: Replica) -> None:
        replica.kill()
        for cell in replica.ranks:
            self.cells.forget(cell)

    # faults

    def _on_death(self, replica: Replica, cell: Cell) -> None:
        """Its other ranks are worth nothing without it."""
        number = replica.number
        if self.replicas.get(number) is not replica:
            return
        self.router.take_out(number, f"{cell.name} {cell.why}")
        del self.replicas[number]
        self._end(replica)
        self.say(f"{cell.name} {cell.why}: its groups are sampled elsewhere, and it is replaced")
        self._replacements.begin(number, lambda: self._bring(number))

    def _on_death_of_spare(self, replica: Replica, cell: Cell) -> None:
        """Another one, if this one was still waiting."""
        if replica in self._spares:
            self._spares.remove(replica)
            self._end(replica)
            self.say(f"{cell.name} {cell.why}: another is started")
            self.prepare()

    def fail(self, number: int, reason: str) -> None:
        """It lives, but cannot be trusted: it is replaced as if it had died."""
        replica = self.replicas.get(number)
        if replica is not None:
            self.router.take_out(number, reason)
            replica.ranks[0].why = reason
            replica.kill()

    async def _bring(self, number: int) -> None:
        """A replica of that number, at the live version before it gets any work."""
        replica = await self._next_engine(number)
        try:
            await self._bring_up(replica)
        except BaseException:  # cancelled included: nobody else knows of it yet
            self._end(replica)
            raise
        if number not in self.router.members:  # it was taken away again
            self._end(replica)
            return
        self._take_in(replica)
        if not replica.is_dead:
            self.router.put_in(number)
            self.say(f"generator {number} serves")
            self.cells.tell("generator_serves", number=number)
        self.prepare()

    async def _next_engine(self, number: int) -> Replica:
        """A spare that waits, or one that is started now."""
        if not self._spares:
            return await self._start_one(number)
        replica = self._spares.pop()
        replica.number = number
        for cell, name in zip(replica.ranks, _rank_names(number, len(replica.ranks)), strict=True):
            cell.name = name
        return replica

    async def _bring_up(self, replica: Replica) -> None:
        """To the version that is live. A trainer that is being mended may withdraw it meanwhile: it comes again."""
        for attempt in range(1, _MAX_BRING_UPS + 1):
            if self.weights is None:
                return
            try:
                return await self.weights.bring_up(replica)
            except Exception:  # the trainer's side may be at fault, which its own owner mends
                if attempt == _MAX_BRING_UPS or replica.is_dead:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    def prepare(self) -> None:
        """Have as many loaded engines wait as the config says, or a process that has its imports done.

        A spare pulls the live version when its turn comes.
        """
        self.standby.make()

        async def spare() -> None:
            try:
                replica = await self._start_one("spare")
            finally:
                self._num_spares_coming -= 1
            self._spares.append(replica)
            for cell in replica.ranks:
                cell.on_death.append(lambda cell: self._on_death_of_spare(replica, cell))
            self.cells.tell("spare_waits", pid=replica.ranks[0].pid)

        for _ in range(self.config.recovery.warm_spares - len(self._spares) - self._num_spares_coming):
            self._num_spares_coming += 1
            self._in_background(spare())

    # more and fewer

    def scale(self, count: int) -> None:
        """Begin to have that many replicas: new ones come up, the last ones end what they have and go."""
        members = self.router.members
        for _ in range(count - len(members)):
            number = max(self.router.members, default=-1) + 1
            self.router.add(number)
            self._replacements.begin(number, lambda number=number: self._bring(number))
        for number in members[count:]:
            self.router.remove(number)
            replica = self.replicas.pop(number, None)  # none: it is being replaced, which ends by itself
            if replica is not None:
                self._in_background(self._dismiss(replica))

    async def _dismiss(self, replica: Replica) -> None:
        """Its groups end first; those that take too long are sampled elsewhere."""
        if replica.num_groups:
            await asyncio.wait(
                {asyncio.ensure_future(replica.idle.wait())}, timeout=self.config.verifier.episode_timeout
            )
        self._end(replica)
        self.say(f"generator {replica.number} was taken away")
        self.cells.tell("generator_gone", number=replica.number)

    def _in_background(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def stop(self) -> None:
        self._replacements.stop()
        self.standby.stop()
        for task in self._work:
            task.cancel()
        self.replicas = {}
