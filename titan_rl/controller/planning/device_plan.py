"""Placement of processes on GPUs, their memory, and the remaining room for KV caches.

What does not fit is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedConfig

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import HostsConfig, hosts_of
from titan_rl.config.sections.schema import Config, GeneratorConfig
from titan_rl.controller.planning.colocated_memory import PUT_ASIDE, held_at_turn, peak
from titan_rl.controller.planning.device_memory import (
    Bytes,
    engine_rank,
    frozen_rank,
    kv_bytes,
    mapped,
    passing_rank,
    slots_of_rank,
    snapshots_of_rank,
    trained_rank,
)
from titan_rl.controller.planning.memory_plan import GIB, Need, Size, draft_of, size_at
from titan_rl.controller.preflight.checks import Checked, read_config
from titan_rl.mesh.resources.devices import (
    ENGINES,
    GENERATOR,
    HELPER,
    TRAINER,
    Crew,
    Devices,
    DeviceTable,
    EngineMemory,
    Seat,
    place,
)
from titan_rl.models.builtin.made import image_processor_at
from titan_rl.models.device import gpu_memory
from titan_rl.models.layers.rope import num_positions
from titan_rl.trainer.roles.names import DRAFTER, configured_paths, learned_role, needed_roles, own_learned
from titan_rl.trainer.titan_config import TitanConfig, role_titan

Who = tuple[str, int, int]
"""A process: its role, group and rank."""


@dataclass(frozen=True)
class Machine:
    """Hosts that are all alike."""

    devices_per_host: int
    memory: float
    """Bytes of each GPU."""
    hosts: int = 1


def machine_of(checked: Checked) -> Machine | None:
    """GPUs of a run's hosts by its configuration, or of this machine. None: a CPU."""
    hosts, launcher = checked.config.hosts, checked.host_launcher
    if not hosts.is_on:
        return this_machine()
    assert launcher is not None, "checks.py has made it"
    return machine_of_hosts(hosts, launcher.count)


def machine_of_hosts(hosts: HostsConfig, count: int) -> Machine | None:
    """GPUs of ``count`` hosts by ``[hosts]``. None: they compute on CPUs."""
    return Machine(hosts.gpus, hosts.gpu_memory_gib * GIB, count) if hosts.gpus and count else None


def this_machine() -> Machine | None:
    """GPUs of this machine; None without."""
    sizes = gpu_memory()
    return Machine(len(sizes), min(sizes)) if sizes else None


@dataclass(frozen=True)
class DevicePlan:
    """Placement and memory of a run. ``needs`` by GPU, in process order; ``on_host``: of each host's memory."""

    machine: Machine
    table: DeviceTable
    needs: Mapping[Seat, list[Need]]
    on_host: Mapping[int, list[Need]]
    share: float
    """Of a GPU's memory that may be used."""
    kv_cache: float
    """Bytes of each rank of an engine."""
    helper_kv_cache: float = 0.0
    """The same of engines on the trainer's devices."""
    in_turns: frozenset[str] = frozenset()
    """Roles of the trainer that take turns with engines."""

    def held(self, seat: Seat) -> float:
        """Bytes on a GPU, at most at any time."""
        holds = [(need.process.split()[0], need.bytes_by_reason) for need in self.needs[seat]]
        return peak(holds, self.in_turns, PUT_ASIDE)

    @cached_property
    def devices(self) -> Devices:
        """Device table and memory limits for the mesh."""
        engine = self._engine_memory(GENERATOR, self.kv_cache)
        return Devices(self.table, engine, self._engine_memory(HELPER, self.helper_kv_cache))

    def _engine_memory(self, role: str, kv_cache: float) -> EngineMemory:
        at_seats = (zip(self.table.at(seat), needs, strict=True) for seat, needs in self.needs.items())
        engines = [need.total for at_seat in at_seats for (of, _, _), need in at_seat if of == role]
        return EngineMemory(kv_cache / GIB, min(max(max(engines, default=0.0) / self.machine.memory, 0.01), 0.99))


class Models:
    """Models of a configuration, and the memory of each role's processes."""

    def __init__(self, checked: Checked, cached: "Models | None" = None):
        """``cached``: of another configuration that has the same models, which are not counted again."""
        self.checked, self.config, self.titan = checked, checked.config, checked.titan
        self.hf: PreTrainedConfig = cached.hf if cached else read_config(checked)
        self.policy = cached.policy if cached else Size.of(self.hf, checked.family, checked.config.lora)
        self.sizes: dict[str, Size] = cached.sizes if cached else {}
        self.drafting = cached.drafting if cached else draft_of(checked)
        needs = checked.algorithm.needs
        self.learned, self.own = learned_role(self.config, needs), own_learned(self.config, needs)
        self.frozen = [r for r in needed_roles(needs) if r != "reference" or not self.config.lora.rank]

    def is_own(self, role: str) -> bool:
        return getattr(self.config, role).placement == "own"

    def size(self, role: str) -> Size:
        """A role's whole model, which is one."""
        [size] = self.sizes_of(role)
        return size

    def sizes_of(self, role: str) -> list[Size]:
        """All models of a role: teachers may be several."""
        if role == DRAFTER and self.draft:
            return [self.draft]
        return [self._size_at(path) for path in configured_paths(self.config, role)]

    def _size_at(self, path: str) -> Size:
        if path not in self.sizes:
            self.sizes[path] = size_at(self.checked, path)
        return self.sizes[path]

    @property
    def draft(self) -> Size | None:
        """Of a draft model, if engines have one."""
        return self.drafting[1] if self.drafting else None

    @property
    def of_engine(self) -> list[PreTrainedConfig]:
        """The policy, and the draft model if engines have one."""
        return [self.hf, *([self.drafting[0]] if self.drafting else [])]

    def of_engine_rank(self, generator: GeneratorConfig) -> Bytes:
        """A rank of an engine with these settings."""
        learns, image_tokens = self.learned == DRAFTER, self._image_tokens()
        return engine_rank(self.hf, self.policy, generator, self.draft, draft_learns=learns, image_tokens=image_tokens)

    def _image_tokens(self) -> int:
        """Of the largest image that an engine may be shown."""
        try:
            images = image_processor_at(self.config.model.path, self.config.model.images)
        except ValueError:  # a directory of sizes alone, which says nothing of images
            return self.max_tokens
        return min(images.most_tokens, self.max_tokens) if images else 0

    def titan_of(self, role: str) -> TitanConfig:
        return role_titan(self.config, role)

    @property
    def max_tokens(self) -> int:
        return min(self.titan.training.seq_len, num_positions(self.hf))

    def of_trainer(self) -> Bytes:
        """A rank of the policy, with the roles that share its process."""
        needs = trained_rank(self.policy, self.titan)
        for role in self.frozen:
            for size in [] if self.is_own(role) else self.sizes_of(role):
                needs = _sum(needs, frozen_rank(size, self.titan))
        if self.learned and not self.own:
            needs = _sum(needs, trained_rank(self.size(self.learned), self.titan))
        if self.config.has_generators:
            sent = [self.policy, *([self.size(DRAFTER)] if self.learned == DRAFTER else [])]
            dtype = self.config.generator.dtype
            needs["weights to send"] = sum(slots_of_rank(size, self.titan, dtype) for size in sent)
        return needs | passing_rank(self.hf, self.policy, self.titan, learns=True)

    def of_role(self, role: str) -> Bytes:
        """A rank of one with processes of its own."""
        sizes, titan, learns = self.sizes_of(role), self.titan_of(role), role == self.own
        needs: Bytes = {}
        for size in sizes:
            needs = _sum(needs, trained_rank(size, titan) if learns else frozen_rank(size, titan))
        largest = max(sizes, key=lambda size: size.parameters)  # one passes rows at a time
        return needs | passing_rank(self.hf, largest, titan, learns=learns)

    def snapshots(self, role: str) -> float:
        """Bytes of a rank's snapshots in host memory."""
        if not self.config.recovery.snapshot_every:
            return 0.0
        if role != TRAINER:
            return snapshots_of_rank(self.size(role), self.titan_of(role)) if role == self.own else 0.0
        beside = snapshots_of_rank(self.size(self.learned), self.titan) if self.learned and not self.own else 0.0
        return snapshots_of_rank(self.policy, self.titan) + beside

    @property
    def in_turns(self) -> frozenset[str]:
        """Ranks of the trainer, if they take turns with engines."""
        placement = self.config.placement
        takes_turns = placement.mode == "colocated" or placement.helper_generators
        return frozenset({TRAINER, self.own} - {None}) if takes_turns else frozenset()

    def crews(self, parts: frozenset[str]) -> list[Crew]:
        crews = []
        if "trainer" in parts:
            crews.append(Crew(TRAINER, self.titan.world_size))
            roles = ([self.own] if self.own else []) + [role for role in self.frozen if self.is_own(role)]
            crews += [Crew(r, self.titan_of(r).world_size, mend=f"[{r}.parallelism]") for r in roles]
        if "generators" in parts:
            generator, spares = self.config.generator, self.config.recovery.warm_spares
            mend = "generator.replicas or .tensor_parallel" + (", or recovery.warm_spares" if spares else "")
            groups = generator.replicas + spares
            crews.append(Crew(GENERATOR, generator.tensor_parallel, groups, of_one_host=True, mend=mend))
        return crews


def _sum(one: Bytes, other: Bytes) -> Bytes:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {**one, **other}}


def plan_devices(
    checked: Checked, machine: Machine, parts: frozenset[str] | None = None, cached: Models | None = None
) -> DevicePlan:
    """``parts``: as in ``Meshes``; None: those of a run. ``cached``: its models, where they were counted already.
    Errors: ConfigError for what does not fit."""
    if parts is None:
        parts = frozenset({"trainer", "generators"} if checked.config.has_generators else {"trainer"})
    models, config = Models(checked, cached), checked.config
    where = partial(hosts_of, config.hosts, count=machine.hosts) if config.hosts.is_on else None
    table = place(models.crews(parts), config.placement, machine.devices_per_host, machine.hosts, where)
    if config.placement.helper_generators and {TRAINER, GENERATOR} <= set(table.seats):
        table = _with_helpers(table, config)
    in_turns = models.in_turns if {TRAINER, GENERATOR} <= set(table.seats) else frozenset()
    holds = {role: _holds(models, role) for role in table.seats}
    by_seat = {seat: [(who, _at(seat, table, who, holds)) for who in table.at(seat)] for seat in table.used()}
    share = config.generator.gpu_memory_utilization
    caches = {role: _kv_cache(models, role, share * machine.memory, by_seat.values(), in_turns) for role in ENGINES}
    needs = {seat: [_need(models, who, its, caches) for who, its in each] for seat, each in by_seat.items()}
    on_hosts = _on_hosts(models, table, in_turns, holds)
    plan = DevicePlan(machine, table, needs, on_hosts, share, caches[GENERATOR], caches[HELPER], in_turns)
    _check_fits(plan)
    return plan


def _with_helpers(table: DeviceTable, config: Config) -> DeviceTable:
    """Errors: ConfigError over several hosts, where trainer and engines share a GPU, or the trainer has too few."""
    count = config.placement.helper_generators
    if table.hosts > 1:
        raise ConfigError(
            f"placement.helper_generators = {count}: helpers are for a run on one host; leave it out with several hosts"
        )
    if set(table.of_role(TRAINER)) & set(table.of_role(GENERATOR)):
        raise ConfigError(
            f"placement.helper_generators = {count}: trainer and engines share a GPU, so that it has nothing to lend; "
            f"leave it out, or take placement.mode = 'colocated'"
        )
    return table.with_helpers(count, config.generator.tensor_parallel)


def _holds(models: Models, role: str) -> Bytes:
    if role == TRAINER:
        return models.of_trainer()
    if role in ENGINES:
        return models.of_engine_rank(models.config.generator)
    return models.of_role(role)


def _at(seat: Seat, table: DeviceTable, who: Who, holds: Mapping[str, Bytes]) -> Bytes:
    """What one process holds there. Engines of the same host read the policy's slots where they are."""
    if who[0] != TRAINER:
        return holds[who[0]]
    engines = (group for role in ENGINES for group in table.engines(role))
    readers = {each for group in engines for each in group if each.host == seat.host} - {seat}
    return holds[TRAINER] | ({"mapped by engines": mapped(len(readers))} if readers else {})


def _need(models: Models, who: Who, holds: Bytes, kv_caches: Mapping[str, float]) -> Need:
    cache = {"KV cache": kv_caches[who[0]]} if who[0] in ENGINES else {}
    return Need(_name(models, *who), holds | cache)


def _name(models: Models, role: str, group: int, rank: int) -> str:
    if role not in ENGINES:
        return f"{role} rank {rank}"
    generator = models.config.generator
    is_spare = role == GENERATOR and group >= generator.replicas
    number = "spare" if is_spare else group + (generator.replicas if role == HELPER else 0)
    return f"generator {number}" + (f" rank {rank}" if generator.tensor_parallel > 1 else "")


def _kv_cache(
    models: Models, role: str, usable: float, by_seat: Iterable[list[tuple[Who, Bytes]]], in_turns: frozenset[str]
) -> float:
    """Bytes of each rank of engines of this role: as the user says, or as much as all requests at once can need, if
    there is so much left; but for one at its longest, or nothing could be sampled."""
    generator = models.config.generator
    together = [[(of, its) for (of, _, _), its in each] for each in by_seat]
    held = [held_at_turn(each, in_turns, engines=True, aside=PUT_ASIDE) for each in together if role in dict(each)]
    rooms = [usable - size for size in held]
    if not rooms or generator.kv_cache_gib:
        return generator.kv_cache_gib * GIB if rooms else 0.0
    least, most = (kv_bytes(models.of_engine, generator, models.max_tokens, n) for n in (1, generator.max_num_seqs))
    return max(least, min(*rooms, most))


def _on_hosts(
    models: Models, table: DeviceTable, in_turns: frozenset[str], holds: Mapping[str, Bytes]
) -> dict[int, list[Need]]:
    """By role: snapshots, and what lies there while engines have their turn."""
    needs_of_host: dict[int, list[Need]] = {host: [] for host in range(table.hosts)}
    for role in [role for role in table.seats if role not in ENGINES]:
        each = {"snapshots": models.snapshots(role), "moments": holds[role]["moments"] if role in in_turns else 0.0}
        for host in needs_of_host:
            ranks = sum(seat.host == host for group in table.seats[role] for seat in group)
            if needs := {reason: ranks * size for reason, size in each.items() if ranks * size}:
                needs_of_host[host].append(Need(f"{role} ranks", needs))
    return needs_of_host


def _check_fits(plan: DevicePlan) -> None:
    usable = plan.share * plan.machine.memory
    seat = max(plan.needs, key=plan.held)
    needs, whole = plan.needs[seat], plan.held(seat)
    if whole <= usable * (1 + 1e-9):  # a KV cache takes what is left to the last byte
        return
    mends = [
        "more ranks in [parallelism]",
        "[lora]",
        "a shorter training.seq_len",
        "activation_checkpoint.mode = 'full'",
    ]
    if any("KV cache" in need.bytes_by_reason for need in needs):
        mends += ["a smaller generator.kv_cache_gib or generator.max_num_seqs"]
        mends = ["fewer placement.helper_generators"] * (HELPER in plan.table.seats) + mends
        mends += [] if plan.in_turns else ["turns (placement.mode = 'colocated')"]
    raise ConfigError(
        f"GPU {seat.device} of host {seat.host} would have to hold {whole / GIB:.1f} GiB, and {usable / GIB:.1f} "
        f"({plan.share:g} of {plan.machine.memory / GIB:.1f}) may be used: {'; '.join(map(str, needs))}. Take one of: "
        f"{', '.join(mends)}; or raise generator.gpu_memory_utilization"
    )
