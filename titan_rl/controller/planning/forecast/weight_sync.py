"""Bytes and seconds of one weight version, from trainer ranks to engines. Pure arithmetic.

The weight plan (mesh/channel/plan.py) is made for planned ranks, from the model's shapes and the layout, as TorchTitan
and vLLM cut it. What it then says of who reads how much from whom is exact.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil

from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.training import Layout
from titan_rl.mesh.channel.plan import Box, Holding, Interner, Need, Plan, Units, split_name


@dataclass(frozen=True)
class Route:
    """From trainer ranks to replicas of so many ranks each."""

    shards: int
    """Of the model, over the trainer's ranks; its replicas send, too."""
    senders: int
    replicas: int
    ranks: int
    crosses_hosts: bool
    copies: int
    """Of the model that trainers send; what is more, hosts hand on to each other."""


@dataclass(frozen=True)
class Syncing:
    publish: float
    """Cast, copied and summed, before the next update may begin."""
    fetch: float
    """Beside generation."""
    apply: float
    """Generation stands still."""
    sent: float
    """Bytes of one trainer rank."""
    received: float
    """Bytes of one engine rank."""

    @property
    def seconds(self) -> float:
        """From a version's publication until all have it."""
        return self.publish + self.fetch + self.apply


def syncing(parameters: int, element: int, route: Route, rates: Rates, adapters: tuple[int, int] = (0, 0)) -> Syncing:
    """A shard is read in fp32 and written as it is sent, then read for its checksum; the reader writes and sums it, and
    reads it again into the parameters. ``adapters``: how many numbers of them are sent instead, and their width in
    bytes; a reader merges them into the base weights."""
    count, width = adapters if adapters[0] else (parameters, element)
    held, received = count * width / route.shards, count * width / route.ranks
    sent = count * width * route.copies / route.senders
    bandwidth = rates.network if route.crosses_hosts else rates.link
    stored = parameters * element / route.ranks
    return Syncing(
        publish=(count / route.shards * 4 + 2 * held) / rates.memory,
        fetch=max(sent, received) / bandwidth + rates.seconds_sync + (2 * stored / rates.memory if adapters[0] else 0),
        apply=2 * stored / rates.memory,
        sent=sent,
        received=received,
    )


Shapes = Mapping[str, tuple[int, ...]]
"""Of a checkpoint's tensors, by their names."""
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one version."""

    sent: tuple[int, ...]
    """By each trainer rank."""
    received: tuple[int, ...]
    """By each rank of one engine."""
    model: int
    """Of all tensors, once."""

    @property
    def copies(self) -> float:
        """Of the model that trainers send in all."""
        return sum(self.sent) / self.model


def cut_dimension(name: str) -> int | None:
    """By which tensor parallelism shares a tensor out; None: every rank has the whole."""
    part = name.split(".")[-2] if "." in name else name
    return 0 if part in _BY_ROWS else 1 if part in _BY_COLUMNS else None


def part_of(box: Box, dimension: int | None, index: int, count: int) -> Box | None:
    """The index-th of so many parts, as torch.chunk cuts; None where nothing is left for it."""
    if dimension is None or count == 1 or dimension >= len(box.size):
        return box
    each = ceil(box.size[dimension] / count)
    first = index * each
    size = min(each, box.size[dimension] - first)
    if size <= 0:
        return None
    at = list(zip(box.start, box.size, strict=True))
    at[dimension] = (box.start[dimension] + first, size)
    return Box(tuple(start for start, _ in at), tuple(n for _, n in at))


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _stage_of(unit: str, name: str, num_layers: int, stages: int) -> int:
    """Layers in equal runs; what is before them in the first stage, what is behind in the last."""
    if unit:
        return int(unit.split(".")[-2]) * stages // num_layers
    return 0 if "embed_tokens" in name else stages - 1


def trainer_holdings(shapes: Shapes, layout: Layout, interner: Interner) -> list[Units]:
    """Of each rank, in TorchTitan's order: stage, replica, shard, tensor, the last fastest."""
    parameters = [(name, *split_name(name), shape) for name, shape in shapes.items()]
    num_layers = len({unit for _, unit, _, _ in parameters if unit}) or 1
    degrees = (layout.stages, layout.replicas, layout.sharers, layout.tensor)
    ranks = []
    for stage, _, shard, tensor in product(*map(range, degrees)):
        held = []
        for name, unit, short, shape in parameters:
            if _stage_of(unit, name, num_layers, layout.stages) != stage:
                continue
            box = part_of(_whole(shape), cut_dimension(name), tensor, layout.tensor)
            box = box and part_of(box, 0, shard, layout.sharers)
            if box is not None:
                held.append((unit, Holding(short, box)))
        ranks.append(interner.units(held))
    return ranks


def engine_needs(shapes: Shapes, ranks: int, interner: Interner, dtype: str = "bfloat16") -> list[Units]:
    """Of each rank of an engine."""
    needs = []
    for rank in range(ranks):
        parts = [(name, part_of(_whole(shape), cut_dimension(name), rank, ranks)) for name, shape in shapes.items()]
        needs.append(interner.units(_needs(parts, dtype)))
    return needs


def _needs(parts: Iterable[tuple[str, Box | None]], dtype: str) -> Iterable[tuple[str, Need]]:
    for name, box in parts:
        if box is not None:
            unit, short = split_name(name)
            yield unit, Need(short, box, dtype)


def traffic(shapes: Shapes, layout: Layout, replicas: int, ranks: int, copies: int = 0) -> Traffic:
    """``copies``: how many engines read from the trainer's ranks, the others from each other; 0: all do."""
    interner = Interner()
    plan = Plan(trainer_holdings(shapes, layout, interner), engine_needs(shapes, ranks, interner))
    sent: Counter[int] = Counter()
    for replica, reader in product(range(copies or replicas), range(ranks)):
        for read in plan.reads(reader, replica).reads:
            sent[read.holder] += read.nbytes
    received = tuple(plan.reads(reader, 0).nbytes for reader in range(ranks))
    model = 2 * sum(_whole(shape).numel for shape in shapes.values())
    return Traffic(tuple(sent[rank] for rank in range(layout.ranks)), received, model)
