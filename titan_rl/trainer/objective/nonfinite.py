"""Search for the samples of a NaN or Inf loss or gradient, run only after one occurred.

The batch was not applied, so its forward passes can be had again. What is cheap to see is looked at first: what the
generator reported, then the log-probabilities and losses of the pass that went wrong. Only if all of them are finite
are gradients taken apart, row by row and then sample by sample. All ranks ask together: their passes hold collectives.

The two answers of a pair have one loss, so they are never taken apart: they are looked at, and named, together.

Dimensions: K statistics of a token, S trained tokens of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer

from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.nonfinite import Culprit, NonfiniteBatch
from titan_rl.data.types import Row
from titan_rl.trainer.distributed.ranks import gathered
from titan_rl.trainer.titan_config import TitanConfig

_MAX_WEIGHTS = 4
"""Names of weights in a message."""


class SearchedModel(Protocol):
    """Trained model, as the search reads it: the policy, or a learned role."""

    @property
    def optimizer(self) -> OptimizersContainer: ...

    @property
    def titan(self) -> TitanConfig: ...

    @property
    def statistics(self) -> dict[int, torch.Tensor]:
        """Head outputs [K, S] of each row of the last pass, on ranks that have the head."""
        ...

    @property
    def gives(self) -> str:
        """Name of the head's output, for messages."""
        ...

    @property
    def samples_per_loss(self) -> int:
        """Number of samples with a joint loss: 2 for preference pairs, else 1."""
        ...

    @property
    def names_rows(self) -> bool:
        """Whether a sample's prompt names the row of data that it comes from."""
        ...

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Accumulate the gradients of rows; returns sums over their trained tokens."""
        ...

    def gradient_norm(self) -> float:
        """Norm of all ranks' gradients, before they are clipped."""
        ...

    def is_finite_everywhere(self, value: float) -> bool:
        """Whether a value is finite on all ranks."""
        ...

    def loss_of(self, row: Row, statistics_KS: torch.Tensor, /) -> float:
        """Loss of a row, computed from head outputs [K, S]."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained parameters, by name."""
        ...


def parts(row: Row) -> Iterator[tuple[tuple[str, int], slice]]:
    """Samples of a row: ((prompt, sample), slice of trained tokens) of each."""
    start = 0
    for prompt_id, sample, count in row.owners:
        yield (prompt_id, sample), slice(start, start + count)
        start += count


@dataclass(frozen=True)
class Unit:
    """Part of a row with its own loss: one sample, or both answers of a pair."""

    owners: list[tuple[str, int, int]]
    places: slice
    """Of the owners, in the row."""
    sides: list[slice]
    """The trained tokens of each sample."""

    @property
    def tokens(self) -> slice:
        return slice(self.sides[0].start, self.sides[-1].stop)

    @property
    def name(self) -> tuple[str, int]:
        return self.owners[0][:2]

    def where(self, is_bad: Callable[[slice], bool]) -> str | None:
        """Suffix that names the bad answer of a pair; empty if all are bad, None if none is."""
        bad = [is_bad(side) for side in self.sides]
        if not any(bad):
            return None
        return "" if all(bad) else f" of the {('chosen', 'rejected')[bad.index(True)]} answer"


def units(row: Row, samples_per_loss: int) -> Iterator[Unit]:
    """Units of a row, in order. ``samples_per_loss``: 2 for pairs, which are adjacent (packing.py), else 1."""
    sides = [part for _, part in parts(row)]
    for begin in range(0, len(sides), samples_per_loss):
        unit = slice(begin, begin + samples_per_loss)
        yield Unit(row.owners[unit], unit, sides[unit])


def only(row: Row, unit: Unit) -> Row:
    """Row restricted to the trained tokens of one unit, without joins to other rows."""
    columns = ("source_S", "target_S", "logprob_S", "advantage_S", "weight_S")
    role_columns = {name: values[unit.tokens] for name, values in row.role_columns.items()}
    unit_columns = {name: getattr(row, name)[unit.tokens] for name in columns}
    sampled = {"mask": row.mask and row.mask.take(np.arange(unit.tokens.start, unit.tokens.stop))}
    sampled |= {"penalized": row.penalized[unit.places], "reprompts": row.reprompts[unit.places]}
    return replace(
        row, **unit_columns, **sampled, role_columns=role_columns, owners=unit.owners, rollouts=[], split=frozenset()
    )


def _is_finite(values: np.ndarray | float) -> bool:
    return bool(np.isfinite(values).all())


def _nonfinite_samples(learner: SearchedModel, rows: list[Row]) -> dict[tuple[str, int], str]:
    """What is not finite of this rank's samples, as far as the pass that went wrong tells; the first cause of each."""
    causes = {}
    for index, row in enumerate(rows):
        statistics = learner.statistics.get(index)  # None: another stage of the pipeline has it
        for unit in units(row, learner.samples_per_loss):
            if cause := _cause(learner, row, unit, statistics):
                causes[unit.name] = cause
    return causes


def _cause(learner: SearchedModel, row: Row, unit: Unit, statistics: torch.Tensor | None) -> str:
    """The first that is not finite; empty if all is."""
    columns = {"sampling logprob": row.logprob_S}
    columns |= {name.removesuffix("_S").replace("_", " "): values for name, values in row.role_columns.items()}
    if statistics is not None:
        columns |= {learner.gives: statistics[0].float().cpu().numpy()}
    for what, values in columns.items():
        if (whose := unit.where(lambda side, values=values: not _is_finite(values[side]))) is not None:
            return f"{what}{whose}"
    if statistics is None or _is_finite(learner.loss_of(only(row, unit), statistics[:, unit.tokens])):
        return ""
    return "loss"


def _bad_weights(learner: SearchedModel) -> list[str]:
    names = []
    for name, parameter in learner.weights():
        values = parameter.detach()
        values = values.to_local() if isinstance(values, DTensor) else values
        if not torch.isfinite(values).all():
            names.append(name)
    return names


def _has_bad_gradient(learner: SearchedModel, row: Row) -> bool:
    learner.forward_backward([row])
    norm = learner.gradient_norm()
    learner.optimizer.zero_grad()
    return not learner.is_finite_everywhere(norm)


def _bad_gradients(learner: SearchedModel, rows: list[Row]) -> dict[tuple[str, int], str]:
    """Each row of each group of ranks by itself, the others idle; then each unit of the rows that are bad."""
    mine, causes = learner.titan.batch_rank(dist.get_rank()), {}
    owners = {learner.titan.batch_rank(rank): names for rank, names in enumerate(gathered([r.owners for r in rows]))}
    for group in range(learner.titan.batch_degree):
        for index, names in enumerate(owners[group]):
            row = rows[index] if group == mine else dummy_row()
            if not _has_bad_gradient(learner, row):
                continue
            for unit in units(replace(dummy_row(), owners=names), learner.samples_per_loss):
                if _has_bad_gradient(learner, only(row, unit) if group == mine else row):
                    causes[unit.name] = "gradient"
    return causes


def find_nonfinite_samples(learner: SearchedModel, rows: list[Row], reason: str) -> NonfiniteBatch:
    """Find the samples behind a NaN or Inf; all ranks call it after discarding gradients.

    Returns the same on each rank."""
    everyones = gathered((_nonfinite_samples(learner, rows), _bad_weights(learner)))
    causes: dict[tuple[str, int], str] = {}
    for rank_causes, _ in everyones:
        causes |= rank_causes
    weights = list(dict.fromkeys(name for _, names in everyones for name in names))
    if not causes and not weights:
        causes = _bad_gradients(learner, rows)
    names_rows = learner.names_rows
    culprits = [Culprit(name, None if names_rows else sample, what) for (name, sample), what in sorted(causes.items())]
    return NonfiniteBatch(reason, culprits, weights[:_MAX_WEIGHTS], len(weights))
