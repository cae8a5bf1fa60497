"""Which process works on which GPU: one table for all roles, made before anything starts. Pure arithmetic.

Ranks of a role have a GPU each, since NCCL refuses two on one; those of an engine are on one host. Roles share GPUs
where the run has one alone, where ``[placement]`` names the same ones, or where trainer and engines take turns
(``mode = "colocated"``). A process sees all GPUs of its host and takes
the one that the table gives it: what is mapped between processes (CUDA IPC) carries numbers of devices.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.placement import PlacementConfig
from titan_rl.config.sections.schema import GeneratorConfig

TRAINER, GENERATOR, HELPER = "trainer", "generator", "helper generator"
ENGINES = (GENERATOR, HELPER)


@dataclass(frozen=True, order=True)
class Seat:
    """GPU, by host number and index there."""

    host: int
    device: int


@dataclass(frozen=True)
class Crew:
    """Processes of a role that need GPUs: so many groups, each of so many ranks."""

    role: str
    ranks: int
    groups: int = 1
    of_one_host: bool = False
    """Whether a group's ranks must share a host."""
    mend: str = "[parallelism]"
    """The setting that says how many."""


@dataclass(frozen=True)
class DeviceTable:
    """``seats[role][group][rank]``."""

    hosts: int
    devices_per_host: int
    seats: Mapping[str, Sequence[Sequence[Seat]]] = field(default_factory=dict)

    def of_role(self, role: str) -> list[Seat]:
        """Of the ranks of a role of one group; none for a role without processes."""
        return [seat for group in self.seats.get(role, ()) for seat in group]

    def engines(self, role: str = GENERATOR) -> list[tuple[Seat, ...]]:
        """Of each engine that there is room for, its ranks' seats. ``role``: or those on the trainer's devices."""
        return [tuple(group) for group in self.seats.get(role, ())]

    def with_helpers(self, count: int, ranks: int) -> "DeviceTable":
        """With so many engines on the trainer's devices. Errors: ConfigError if those are too few."""
        crew = Crew(HELPER, ranks, count, of_one_host=True, mend="placement.helper_generators")
        free = self.of_role(TRAINER)
        words = f"{len(free)} of the trainer"
        return replace(self, seats={**self.seats, HELPER: list(_seated(crew, free, words))})

    def at(self, seat: Seat) -> list[tuple[str, int, int]]:
        """Ranks on a GPU: (role, group, rank)."""
        return self._who.get(seat, [])

    @cached_property
    def _who(self) -> dict[Seat, list[tuple[str, int, int]]]:
        workers: dict[Seat, list[tuple[str, int, int]]] = {}
        for role, groups in self.seats.items():
            for number, group in enumerate(groups):
                for rank, seat in enumerate(group):
                    workers.setdefault(seat, []).append((role, number, rank))
        return workers

    def used(self) -> list[Seat]:
        return sorted({seat for groups in self.seats.values() for group in groups for seat in group})


def place(
    crews: Sequence[Crew],
    settings: PlacementConfig,
    devices_per_host: int,
    hosts: int = 1,
    hosts_of: Callable[[str], Collection[int]] | None = None,
) -> DeviceTable:
    """``crews`` in the order in which they take GPUs. ``hosts_of``: those of a role; None: all of them.
    Errors: ConfigError if GPUs are too few, or are none."""
    all_seats = [Seat(host, device) for host in range(hosts) for device in range(devices_per_host)]
    _check_named(crews, settings, devices_per_host)
    taken = {seat for crew in crews for seat in all_seats if seat.device in getattr(settings, crew.role)}
    is_shared = len(all_seats) == 1
    seats: dict[str, list[list[Seat]]] = {}
    for crew in crews:
        named = getattr(settings, crew.role)
        others = taken if settings.mode == "disaggregated" or crew.role != GENERATOR else taken - _of(TRAINER, seats)
        if named:
            free = [Seat(host, device) for host in range(hosts) for device in named]
        else:
            free = [seat for seat in all_seats if is_shared or seat not in others]
        free = [seat for seat in free if hosts_of is None or seat.host in hosts_of(crew.role)]
        seats[crew.role] = list(_seated(crew, free, _words(len(all_seats), hosts)))
        taken |= {seat for group in seats[crew.role] for seat in group}
    return DeviceTable(hosts, devices_per_host, seats)


def _of(role: str, seats: Mapping[str, Sequence[Sequence[Seat]]]) -> set[Seat]:
    return {seat for group in seats.get(role, ()) for seat in group}


def _seated(crew: Crew, free: list[Seat], there: str) -> Iterator[list[Seat]]:
    """The first that fit; a group of one host leaves over what is too little on another."""
    free_seats = list(free)
    for _ in range(crew.groups):
        able = _of_one_host(free_seats, crew.ranks) if crew.of_one_host else free_seats
        if len(able) < crew.ranks:
            total, on_one = crew.groups * crew.ranks, " on one host" if crew.of_one_host and crew.ranks > 1 else ""
            each = f", {crew.ranks} for each engine{on_one}" if crew.of_one_host and crew.groups > 1 else on_one
            left = f"{len(free)} of {there} {'is' if len(free) == 1 else 'are'} left for it"
            raise ConfigError(
                f"the {crew.role} needs {total} GPUs{each}, and {left}: lower "
                f"{crew.mend}, or name GPUs in placement.{crew.role}"
            )
        group = able[: crew.ranks]
        free_seats = [seat for seat in free_seats if seat not in group]
        yield group


def _of_one_host(seats: list[Seat], ranks: int) -> list[Seat]:
    by_host: dict[int, list[Seat]] = {}
    for seat in seats:
        by_host.setdefault(seat.host, []).append(seat)
    return next((its for its in by_host.values() if len(its) >= ranks), [])


def _check_named(crews: Sequence[Crew], settings: PlacementConfig, devices_per_host: int) -> None:
    roles = [crew.role for crew in crews]
    for role, named in vars(settings).items():
        if not (isinstance(named, list) and named):
            continue
        setting = f"placement.{role} = {named}"
        if role not in roles:
            raise ConfigError(
                f'{setting}: it has no processes of its own: leave it out, or set {role}.placement = "own"'
            )
        if len(set(named)) < len(named):
            raise ConfigError(f"{setting} names a GPU twice: name each once")
        if max(named) >= devices_per_host:
            last = devices_per_host - 1
            raise ConfigError(f"{setting}: a host's GPUs are numbered from 0 to {last}: name others")


def _words(count: int, hosts: int) -> str:
    each = f" ({hosts} hosts x {count // hosts})" if hosts > 1 else ""
    return f"{count} GPU{'s' if count != 1 else ''}{each}"


@dataclass(frozen=True)
class EngineMemory:
    """Memory of each rank of an engine."""

    kv_cache_gib: float
    share: float
    """Of a GPU's memory, in all."""


@dataclass(frozen=True)
class Devices:
    """Device placement of a run on GPUs."""

    table: DeviceTable
    engine: EngineMemory
    helper: EngineMemory
    """Of an engine on the trainer's devices."""

    def of_engine(self, generator: GeneratorConfig, *, is_helper: bool = False) -> GeneratorConfig:
        """Settings of an engine, with the placement's memory shares."""
        memory = self.helper if is_helper else self.engine
        return replace(generator, kv_cache_gib=memory.kv_cache_gib, gpu_memory_utilization=memory.share)


def seats_of(devices: Devices | None, *roles: str) -> list[Seat]:
    """GPUs of all ranks of these roles, in order; none on a CPU."""
    return [] if devices is None else [seat for role in roles for seat in devices.table.of_role(role)]


class EngineSeats:
    """Allocation of GPUs to engines; empty on a CPU."""

    def __init__(self, engines: Sequence[tuple[Seat, ...]] | None):
        """``engines``: as in ``DeviceTable.engines``; None: on a CPU."""
        self._free = None if engines is None else list(engines)
        self.count = None if engines is None else len(engines)
        """Of engines that there can be; None: as many as one likes."""

    def take(self, is_there: Callable[[int], bool] = lambda host: True) -> tuple[Seat, ...]:
        """``is_there(host)``: whether a host is not lost; one that is may be had back. Errors: RuntimeError if all are
        taken."""
        if self._free is None:
            return ()
        if not self._free:
            raise RuntimeError(f"the placement has GPUs for {self.count} engines, and all of them are taken")
        engine = next((seats for seats in self._free if is_there(seats[0].host)), self._free[0])
        self._free.remove(engine)
        return engine

    def give_back(self, seats: tuple[Seat, ...]) -> None:
        if self._free is not None and seats:
            self._free.insert(0, seats)
