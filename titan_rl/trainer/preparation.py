"""What is found out about a step's rows before its first update, whatever the algorithm: what the model roles say of
each token, and advantages refined by it, then brought to mean 0 and deviation 1 if the algorithm wants that.

Rows in, rows out: the same rows always get the same numbers, so a step that is begun anew comes out as it did.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from titan_rl.algorithms.base import Algorithm
from titan_rl.data.types import Row
from titan_rl.trainer.objective import loss_inputs, no_statistics
from titan_rl.trainer.ranks import sum_over_ranks
from titan_rl.trainer.sharded_model import Columns

_EPSILON = 1e-8
Finder = Callable[[list[Row]], list[dict[str, np.ndarray]]]
"""What a role says of each of these rows: float32 [S] by name, or nothing on ranks that do not see it."""
Place = tuple[int, int]
"""Of a row among a step's rows of one rank: the number of the update, and its number in it."""
Found = tuple[Place, dict[str, np.ndarray]]
"""What a role in another process found of the row there."""


def with_found(rows: list[Row], finders: Iterable[Finder]) -> list[Row]:
    """The rows, and what all roles found of them."""
    for find in finders:
        rows = [replace(row, found=row.found | found) for row, found in zip(rows, find(rows), strict=True)]
    return rows


def with_places(batches: list[list[Row]], found: Iterable[Found]) -> list[list[Row]]:
    """The rows of each update, with what was found of them elsewhere."""
    batches = [list(rows) for rows in batches]
    for (update, number), columns in found:
        row = batches[update][number]
        batches[update][number] = replace(row, found=row.found | columns)
    return batches


def completed(rows: list[Row], zeros: Callable[[int], dict[str, np.ndarray]]) -> list[Row]:
    """Zeros where nobody found something: of rows that only fill up, and where another stage of a pipeline sees it.

    ``zeros(num_tokens)``: all columns."""
    return [replace(row, found=zeros(len(row.weight_S)) | row.found) for row in rows]


@torch.no_grad()
def refined(algorithm: Algorithm, row: Row, columns: Columns) -> Row:
    """The row with the advantages that the loss gets, and what a critic is to foretell of it."""
    statistics = no_statistics(algorithm, len(row.target_S), columns["weight_S"].device)
    result = algorithm.refine(loss_inputs(algorithm, statistics, columns, columns["offsets_N"]))
    found = row.found if result.return_S is None else row.found | {"return_S": as_array(result.return_S)}
    return replace(row, advantage_S=as_array(result.advantage_S), found=found)


def whitened(rows: list[Row], device: torch.device, *, is_counted: bool) -> list[Row]:
    """Advantages less their mean, over their deviation (over N - 1), of all trained tokens of all ranks' rows. What is
    not finite stays so and has no part in them: its sample alone is at fault.

    ``is_counted``: whether this rank's rows are to be counted: one rank of each group that has the same rows must be.

    Source: REINFORCE++, arXiv 2501.03262, section 3 (global advantage normalization).
    """

    def over_ranks(**sums: float) -> dict[str, float]:
        tensors = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in sums.items()}
        return sum_over_ranks(tensors, is_counted=is_counted)

    advantage_S = np.concatenate([row.advantage_S[row.weight_S > 0] for row in rows]).astype(np.float64)
    advantage_S = advantage_S[np.isfinite(advantage_S)]
    sums = over_ranks(count=len(advantage_S), total=advantage_S.sum())
    mean = sums["total"] / max(sums["count"], 1)
    squares = over_ranks(squares=np.square(advantage_S - mean).sum())["squares"]
    deviation = np.sqrt(squares / max(sums["count"] - 1, 1) + _EPSILON)
    return [replace(row, advantage_S=((row.advantage_S - mean) / deviation).astype(np.float32)) for row in rows]


def as_array(values_S: torch.Tensor) -> np.ndarray:
    """Float32 [S]."""
    return values_S.detach().float().cpu().numpy()
