"""Which samples made a loss or a gradient that is not a finite number: asked when it happened, never before.

The batch was not applied, so its forward passes can be had again. What is cheap to see is looked at first: what the
generator reported, then the log-probabilities and losses of the pass that went wrong. Only if all of them are finite
are gradients taken apart, row by row and then sample by sample. All ranks ask together: their passes hold collectives.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_rl.data.packing import dummy_row
from titan_rl.data.types import BadNumbers, Culprit, Row
from titan_rl.trainer.ranks import gathered

_MAX_WEIGHTS = 4
"""Names of weights that are told."""


def parts(row: Row) -> Iterator[tuple[tuple[str, int], slice]]:
    """(prompt, sample) and the trained tokens of each sample in a row."""
    start = 0
    for prompt_id, sample, count in row.owners:
        yield (prompt_id, sample), slice(start, start + count)
        start += count


def only(row: Row, part: slice) -> Row:
    """The row with nothing but these trained tokens."""
    columns = ("source_S", "target_S", "logprob_S", "advantage_S", "weight_S")
    found = {name: values[part] for name, values in row.found.items()}
    return replace(row, **{name: getattr(row, name)[part] for name in columns}, found=found, owners=[])


def _is_finite(values) -> bool:
    return bool(np.isfinite(values).all())


def _seen(learner, rows: list[Row]) -> dict[tuple[str, int], str]:
    """What is not finite of this rank's samples, as far as the pass that went wrong tells; the first cause of each."""
    found = {}
    for index, row in enumerate(rows):
        statistics = learner.statistics.get(index)
        for name, part in parts(row):
            bad_columns = [column for column, values in row.found.items() if not _is_finite(values[part])]
            if not _is_finite(row.logprob_S[part]):
                found[name] = "sampling logprob"
            elif bad_columns:
                found[name] = bad_columns[0].removesuffix("_S").replace("_", " ")
            elif statistics is None:  # another stage of the pipeline has it
                continue
            elif not _is_finite(statistics[0, part].float().cpu().numpy()):
                found[name] = learner.gives
            elif not _is_finite(learner.loss_of(only(row, part), statistics[:, part])):
                found[name] = "loss"
    return found


def _bad_weights(learner) -> list[str]:
    found = []
    for name, parameter in learner.weights():
        values = parameter.detach()
        values = values.to_local() if isinstance(values, DTensor) else values
        if not torch.isfinite(values).all():
            found.append(name)
    return found


def _has_bad_gradient(learner, row: Row) -> bool:
    learner.forward_backward([row])
    norm = learner.gradient_norm()
    learner.optimizer.zero_grad()
    return not learner.is_finite_everywhere(norm)


def _bad_gradients(learner, rows: list[Row]) -> dict[tuple[str, int], str]:
    """Each row of each group of ranks by itself, the others idle; then each sample of the rows that are bad."""
    mine, found = learner.titan.batch_rank(dist.get_rank()), {}
    owners = {learner.titan.batch_rank(rank): names for rank, names in enumerate(gathered([r.owners for r in rows]))}
    for group in range(learner.titan.batch_degree):
        for index, names in enumerate(owners[group]):
            row = rows[index] if group == mine else dummy_row()
            if not _has_bad_gradient(learner, row):
                continue
            slices = parts(replace(dummy_row(), owners=names))
            for name, part in slices:
                if _has_bad_gradient(learner, only(row, part) if group == mine else row):
                    found[name] = "gradient"
    return found


def find_culprits(learner, rows: list[Row], reason: str) -> BadNumbers:
    """All ranks together, after a pass whose gradients were thrown away; the same answer on each."""
    everyones = gathered((_seen(learner, rows), _bad_weights(learner)))
    found: dict[tuple[str, int], str] = {}
    for seen, _ in everyones:
        found |= seen
    weights = list(dict.fromkeys(name for _, names in everyones for name in names))
    if not found and not weights:
        found = _bad_gradients(learner, rows)
    culprits = [Culprit(prompt_id, sample, what) for (prompt_id, sample), what in sorted(found.items())]
    return BadNumbers(reason, culprits, weights[:_MAX_WEIGHTS], len(weights))
