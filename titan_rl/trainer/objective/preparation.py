"""Columns of model roles and refined advantages, computed for a step's rows before its first update.

Advantages are normalized to mean 0 and deviation 1 if the algorithm asks for it.

Rows in, rows out: the same rows always get the same numbers, so a step that is begun anew comes out as it did.

Dimensions: S trained tokens of a row, N samples of it, M numbers of each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.data.types import Row
from titan_rl.trainer.distributed.ranks import gathered, sum_over_ranks
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.objective.objective import loss_inputs, no_statistics
from titan_rl.trainer.objective.whole_rollouts import Join, join

_EPSILON = 1e-8
Finder = Callable[[list[Row]], list[dict[str, np.ndarray]]]
"""Columns that a role computes for each row: float32 [S] by name; empty on ranks without its head."""
Place = tuple[int, int]
"""Of a row among a step's rows of one rank: the number of the update, and its number in it."""
RowColumns = tuple[Place, dict[str, np.ndarray]]
"""Columns of the row at a place, computed by a role in another process."""


def with_role_columns(rows: list[Row], finders: Iterable[Finder]) -> list[Row]:
    """Rows with the columns of all roles."""
    for find in finders:
        rows = [
            replace(row, role_columns=row.role_columns | columns) for row, columns in zip(rows, find(rows), strict=True)
        ]
    return rows


def with_placed_columns(batches: list[list[Row]], role_columns: Iterable[RowColumns]) -> list[list[Row]]:
    """Rows of each update, with columns computed in other processes."""
    batches = [list(rows) for rows in batches]
    for (update, number), columns in role_columns:
        row = batches[update][number]
        batches[update][number] = replace(row, role_columns=row.role_columns | columns)
    return batches


def completed(rows: list[Row], zeros: Callable[[int], dict[str, np.ndarray]]) -> list[Row]:
    """Rows with zeros for missing columns: dummy rows, and rows whose pipeline stage is elsewhere.

    ``zeros(num_tokens)``: all columns."""
    return [replace(row, role_columns=zeros(len(row.weight_S)) | row.role_columns) for row in rows]


def with_advantages(
    algorithm: Algorithm, batches: list[list[Row]], model: ShardedModel, *, sees: bool, is_counted: bool
) -> list[list[Row]]:
    """Rows of each update with refined advantages and a critic's returns.

    ``sees``: whether this rank has the columns of roles; the others take part in what all ranks do together.
    ``is_counted``: of ranks that have the same rows, one must be.
    """
    is_counted = sees and is_counted
    if algorithm.refines:
        batches = _refined_batches(algorithm, batches, model, sees=sees, is_counted=is_counted)
    rows = [row for rows in batches for row in rows]
    if algorithm.normalizes_batch:
        rows = whitened(rows, model.device, is_counted=is_counted)
    whitened_rows = iter(rows)
    return [[next(whitened_rows) for _ in rows] for rows in batches]


def _compares_groups(algorithm: Algorithm) -> bool:
    return type(algorithm).group_terms is not Algorithm.group_terms


def _refined_batches(
    algorithm: Algorithm, batches: list[list[Row]], model: ShardedModel, *, sees: bool, is_counted: bool
) -> list[list[Row]]:
    """Each row by itself, but for what lies in several: that stands in one more row of its own meanwhile."""
    joins = [Join(rows) for rows in batches]
    if algorithm.needs_whole_rollouts or _compares_groups(algorithm):
        joins = [join(rows, model.device, is_counted=is_counted) for rows in batches]
    wholes = {number: joined.whole for number, joined in enumerate(joins) if joined.whole is not None}
    rows = [*(row for joined in joins for row in joined.rows), *wholes.values()]
    inputs = [_inputs(algorithm, row, model) for row in rows] if sees else []
    if _compares_groups(algorithm):
        counts = [is_counted] * (len(rows) - len(wholes)) + [joins[number].reports for number in wholes]
        inputs = _with_group_sums(algorithm, rows, inputs, counts)
    if not sees:
        return batches
    refined = iter([_refined(algorithm, row, row_inputs) for row, row_inputs in zip(rows, inputs, strict=True)])
    alone = [[next(refined) for _ in joined.rows] for joined in joins]
    refined_wholes = dict(zip(wholes, refined, strict=True))
    return [
        [
            _scattered(joined, index, row, refined_row, refined_wholes.get(number))
            for index, (row, refined_row) in enumerate(both)
        ]
        for number, (joined, both) in enumerate(zip(joins, map(_pairs, batches, alone), strict=True))
    ]


def _pairs(rows: list[Row], refined: list[Row]) -> list[tuple[Row, Row]]:
    return list(zip(rows, refined, strict=True))


def _scattered(joined: Join, index: int, row: Row, alone: Row, whole: Row | None) -> Row:
    """The row as it was, with what was found of it by itself and, of split rollouts, together."""
    if whole is None:
        return replace(row, advantage_S=alone.advantage_S, role_columns=row.role_columns | _returns(alone))
    advantage_S = joined.scattered(alone.advantage_S, index, whole.advantage_S)
    there = _returns(whole)
    returns = {name: joined.scattered(values, index, there[name]) for name, values in _returns(alone).items()}
    return replace(row, advantage_S=advantage_S, role_columns=row.role_columns | returns)


def _returns(row: Row) -> dict[str, np.ndarray]:
    return {name: row.role_columns[name] for name in ("return_S",) if name in row.role_columns}


def _inputs(algorithm: Algorithm, row: Row, model: ShardedModel) -> LossInputs:
    columns = model.columns(row)
    statistics = no_statistics(algorithm, len(row.target_S), model.device)
    inputs = loss_inputs(algorithm, statistics, columns, columns["offsets_N"])
    return replace(inputs, branch_offsets=torch.from_numpy(row.branch_offsets).to(model.device))


@torch.no_grad()
def _refined(algorithm: Algorithm, row: Row, inputs: LossInputs) -> Row:
    result = algorithm.refine(inputs)
    returns = {} if result.return_S is None else {"return_S": as_array(result.return_S)}
    return replace(row, advantage_S=as_array(result.advantage_S), role_columns=row.role_columns | returns)


@torch.no_grad()
def _with_group_sums(
    algorithm: Algorithm, rows: list[Row], inputs: list[LossInputs], counts: list[bool]
) -> list[LossInputs]:
    """Each row's with ``group_sums_NM``. All ranks call this together: their samples are compared, in one collective.

    ``counts``: of each row, whether this rank counts it; rollouts that lie in several rows count where they are whole.
    Numbers are sorted before they are added up, so the sums are the same to the bit wherever a sample lies.
    """
    all_terms = [algorithm.group_terms(row_inputs).double() for row_inputs in inputs]
    mine = [
        (prompt_id, numbers)
        for row, terms_NM, is_counted in zip(rows, all_terms, counts, strict=False)
        for (prompt_id, _), is_whole, numbers in zip(row.samples, row.are_whole, terms_NM.tolist(), strict=False)
        if is_counted and is_whole and np.isfinite(numbers).all()
    ]
    groups = defaultdict(list)
    for prompt_id, numbers in (entry for entries in gathered(mine) for entry in entries):
        groups[prompt_id].append(numbers)
    sums = {prompt_id: np.sort(numbers, axis=0).sum(axis=0) for prompt_id, numbers in groups.items()}

    def of(row: Row, terms_NM: torch.Tensor) -> torch.Tensor:
        nothing = np.zeros(terms_NM.shape[1])  # of samples without a finite one in their group, and of what fills up
        group_sums = [sums.get(prompt_id, nothing) for prompt_id, _ in row.samples] or [nothing]
        return torch.from_numpy(np.stack(group_sums)).to(terms_NM.device)

    return [replace(g, group_sums_NM=of(r, t)) for g, r, t in zip(inputs, rows, all_terms, strict=False)]


def whitened(rows: list[Row], device: torch.device, *, is_counted: bool) -> list[Row]:
    """Advantages normalized to mean 0 and deviation 1 (over N - 1) over all ranks' trained tokens.

    Non-finite advantages stay as they are and are left out of both.

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
