"""Seconds of training on a batch, and the bytes that trainer ranks send each other. Pure arithmetic.

Sources: FSDP gathers weights for the forward and for the backward, and scatters summed gradients (Zhao et al. 2023,
arXiv:2304.11277); sums over tensor-parallel ranks, four a layer with the backward (Shoeybi et al. 2019,
arXiv:1909.08053), and two more where a layer is computed again; a pipeline of p stages stands still for p - 1 of
m + p - 1 turns (Narayanan et al. 2021, arXiv:2104.04473), a v-th of that with v stages a rank.
"""

from dataclasses import dataclass
from math import ceil

from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.work import Batch, Work


@dataclass(frozen=True)
class Layout:
    """Trainer ranks: replicas x shards x context x tensor x stages."""

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    stages: int = 1
    stages_of_rank: int = 1
    recomputed: float = 0.0
    """Of a forward, in the backward: activation checkpointing."""
    gathers_again: bool = True
    """Whether FSDP gathers weights for the backward, too."""
    row_tokens: int = 2048
    element: int = 2
    """Bytes of what is computed with."""
    updates: int = 1
    """Optimizer steps for one batch."""
    devices_per_host: int = 8

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.context * self.tensor * self.stages

    @property
    def sharers(self) -> int:
        """Ranks that FSDP shards over."""
        return self.shards * self.context

    @property
    def groups(self) -> int:
        """Of ranks that take rows of their own."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class Training:
    """Seconds of a batch, and what it is made of."""

    compute: float
    bubble: float
    """Share of the time in which a stage of a pipeline stands still."""
    gathering: float
    """Of FSDP's collectives, beside which ranks compute."""
    adding: float
    """Of tensor and context parallelism's, which are waited for."""
    optimizer: float
    rows: int
    """Of each group of ranks."""
    shard_bytes: float
    """A rank sends so many for FSDP, ``tensor_bytes`` for tensor parallelism, ``context_bytes`` for context
    parallelism, ``stage_bytes`` to the next stage."""
    tensor_bytes: float
    context_bytes: float
    stage_bytes: float

    @property
    def forward_backward(self) -> float:
        return max(self.compute, self.gathering) + self.adding

    @property
    def seconds(self) -> float:
        return self.forward_backward + self.optimizer


def bubble(stages: int, rows: int, stages_of_rank: int = 1) -> float:
    """Share of a step in which a rank of a pipeline stands still."""
    idle = (stages - 1) / stages_of_rank
    return idle / (rows + idle)


def ring(ranks: int, nbytes: float) -> float:
    """Bytes that each rank sends so that all have what is shared over them; as many to add up what all have."""
    return (ranks - 1) / ranks * nbytes


def _between(ranks: int, stride: int, layout: Layout, rates: Rates) -> float:
    """Bytes a second of a ring of ranks that are ``stride`` apart. Over several hosts it has the network cards of its
    ranks of one host, of which each ring on that host has its own."""
    on_host = max(min(ranks, layout.devices_per_host // stride), 1)
    if ranks <= on_host:
        return rates.link
    return min(rates.link, on_host * rates.network)


def num_rows(batch: Batch, layout: Layout) -> int:
    """For each group of ranks; a pipeline's schedule wants a multiple of its stages."""
    rows = max(ceil(batch.trained / (layout.row_tokens * layout.groups)), layout.updates)
    return ceil(rows / layout.stages) * layout.stages


def train_flops(work: Work, batch: Batch, recomputed: float, trained_share: float = 1.0) -> float:
    """Forward, and backward of twice that: half of it for the gradients of weights, which adapters do without."""
    forward = work.forward_flops(batch.trained, batch.attended)
    return forward * (2 + trained_share + recomputed)


def training(work: Work, layout: Layout, rates: Rates, batch: Batch, trained: int, beside: float = 0.0) -> Training:
    """``trained``: parameters that learn. ``beside``: FLOPs of other models that pass the batch in these processes."""
    rows, tokens = num_rows(batch, layout), batch.trained / layout.groups / layout.context
    idle = bubble(layout.stages, rows, layout.stages_of_rank)
    flops = train_flops(work, batch, layout.recomputed, min(trained / work.parameters, 1.0)) + beside
    compute = flops / layout.ranks / (rates.peak_flops * rates.train_share) / (1 - idle) + rows * rates.seconds_row
    held = work.parameters / layout.tensor / layout.stages
    gathers = (1 + layout.gathers_again) * layout.element + 4 * trained / work.parameters
    shard_bytes = rows * ring(layout.sharers, held * gathers)
    shard_bytes += rows * 2 * ring(layout.replicas, 4 * trained / layout.tensor / layout.stages / layout.sharers)
    passes = 2 + (layout.recomputed > 0.5)
    sums, exchanges = 2 * passes * (layout.tensor > 1), 4 * passes * (layout.context > 1)
    each = tokens / layout.stages * work.layers * work.hidden * layout.element
    tensor_bytes = sums * 2 * ring(layout.tensor, each)
    # of queries, keys, values and outputs, each at most as wide as the hidden states
    context_bytes = exchanges * ring(layout.context, each / layout.tensor)
    waits = (sums + exchanges) * work.layers / layout.stages * rows * rates.seconds_collective
    state = trained / (layout.ranks / layout.replicas)
    return Training(
        compute=compute,
        bubble=idle,
        gathering=shard_bytes / _between(layout.replicas * layout.sharers, layout.tensor, layout, rates),
        adding=tensor_bytes / _between(layout.tensor, 1, layout, rates)
        + context_bytes / _between(layout.context, layout.tensor, layout, rates)
        + waits,
        optimizer=layout.updates * (rates.seconds_optimizer + 28 * state / rates.memory),
        rows=rows,
        shard_bytes=shard_bytes,
        tensor_bytes=tensor_bytes,
        context_bytes=context_bytes,
        stage_bytes=2 * tokens * work.hidden * layout.element if layout.stages > 1 else 0.0,
    )
