"""Joining of rollouts whose branches lie in several rows or ranks, for losses of whole rollouts.

    rows ─▶ join ─▶ the same rows, in which these rollouts weigh nothing
                 └▶ one row of all their tokens, the same on every rank ─▶ what was found goes back to each row

Such a row goes through no model: it holds what is known of trained tokens alone. A loss needs what the head gives for
them too, so those rows go forward once more before the update; its gradient for each token is then a constant in the
loss of the row that the token lies in. That is the gradient of the whole, to the last term.

Dimensions: K statistics of a token, S trained tokens of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.types import Row
from titan_rl.trainer.distributed.ranks import anywhere, gathered, rank
from titan_rl.trainer.model.sharded_model import Columns, ShardedModel

Branch = tuple[int, int]
"""Number of a rollout in its batch, and of a branch in the rollout."""
_COLUMNS = ("source_S", "target_S", "logprob_S", "advantage_S", "weight_S")
_WEIGHTS = ("outcome_weight_S",)
"""Token weights of roles."""


@dataclass(frozen=True)
class _Piece:
    """Branch of a split rollout: owner, columns, and head outputs [K, S]."""

    owner: tuple[str, int, int]
    columns: dict[str, np.ndarray]
    role_columns: dict[str, np.ndarray]
    statistics: np.ndarray | None


@dataclass(frozen=True)
class Join:
    """Rows of one rank, and its split rollouts joined in one more row."""

    rows: list[Row]
    """In which split rollouts weigh nothing."""
    whole: Row | None = None
    """Of all split rollouts of the batch; None: there is none, or this rank does not see it."""
    statistics_KS: np.ndarray | None = None
    """Of the tokens of ``whole``."""
    reports: bool = False
    """Whether this rank is the one that counts ``whole``."""
    slices: dict[int, list[tuple[slice, slice]]] = field(default_factory=dict)
    """Of a row by its number, where its split branches are in it and in ``whole``."""

    def scattered(self, values_S: np.ndarray, index: int, whole_S: np.ndarray) -> np.ndarray:
        """Values of a row, with those of split branches taken from ``whole_S``."""
        values_S = values_S.copy()
        for here, there in self.slices.get(index, []):
            values_S[here] = whole_S[there]
        return values_S


def join(
    rows: list[Row],
    device: torch.device,
    measured: Callable[[], Sequence[torch.Tensor | None]] | None = None,
    *,
    is_counted: bool,
) -> Join:
    """Join split rollouts over all ranks; all call it.

    ``measured``: head outputs [K, S] of each row, computed only where a rollout is split.
    ``is_counted``: of ranks that see the same rows, one must be."""
    if not anywhere([any(row.split for row in rows)], device)[0]:
        return Join(rows)
    statistics = [None] * len(rows) if measured is None else measured()
    pieces = [_pieces(row, row_statistics) for row, row_statistics in zip(rows, statistics, strict=True)]
    mine = {branch: piece for row_pieces in pieces for branch, (_, piece) in row_pieces.items()}
    everyones = gathered(mine if is_counted else {})
    all_pieces = {branch: piece for rank_pieces in everyones for branch, piece in rank_pieces.items()}
    if not all_pieces or not mine:
        return Join([_weightless(row) for row in rows])
    order = sorted(all_pieces)
    ends = np.cumsum([0, *(all_pieces[branch].owner[2] for branch in order)]).tolist()
    places = {branch: slice(*ends[n : n + 2]) for n, branch in enumerate(order)}
    return Join(
        [_weightless(row) for row in rows],
        *_whole(order, all_pieces),
        reports=rank() == next(number for number, rank_pieces in enumerate(everyones) if rank_pieces),
        slices={
            index: [(here, places[branch]) for branch, (here, _) in row_pieces.items()]
            for index, row_pieces in enumerate(pieces)
        },
    )


def _pieces(row: Row, statistics: torch.Tensor | None) -> dict[Branch, tuple[slice, _Piece]]:
    """Each branch of a split rollout, and its tokens in the row."""
    offsets, pieces = row.branch_offsets.tolist(), {}
    values = None if statistics is None else statistics.detach().reshape(-1, statistics.shape[-1]).float().cpu().numpy()
    for n, branch in enumerate(row.rollouts):
        if branch[0] in row.split:
            tokens = slice(*offsets[n : n + 2])
            columns = {name: getattr(row, name)[tokens] for name in _COLUMNS}
            role_columns = {name: column[tokens] for name, column in row.role_columns.items()}
            outputs = None if values is None else values[:, tokens]
            pieces[branch] = tokens, _Piece(row.owners[n], columns, role_columns, outputs)
    return pieces


def _weightless(row: Row) -> Row:
    """With weight 0 for split rollouts."""
    if not row.split:
        return row
    is_split = [number in row.split for number, _ in row.rollouts]
    split_S = np.repeat(is_split, np.diff(row.branch_offsets))
    columns = {name: row.role_columns[name] for name in _WEIGHTS if name in row.role_columns}
    weights = {name: np.where(split_S, 0, column).astype(np.float32) for name, column in columns.items()}
    weight_S = np.where(split_S, 0, row.weight_S).astype(np.float32)
    return replace(row, weight_S=weight_S, role_columns=row.role_columns | weights)


def _whole(order: list[Branch], all_pieces: dict[Branch, _Piece]) -> tuple[Row, np.ndarray | None]:
    pieces = [all_pieces[branch] for branch in order]
    names = set.intersection(*(set(piece.role_columns) for piece in pieces))
    columns = {name: np.concatenate([piece.columns[name] for piece in pieces]) for name in _COLUMNS}
    role_columns = {name: np.concatenate([piece.role_columns[name] for piece in pieces]) for name in sorted(names)}
    row = replace(
        dummy_row(), **columns, role_columns=role_columns, owners=[piece.owner for piece in pieces], rollouts=order
    )
    statistics = [piece.statistics for piece in pieces if piece.statistics is not None]
    return row, np.concatenate(statistics, axis=1) if len(statistics) == len(pieces) else None


Sums = dict[str, torch.Tensor]
RowLoss = Callable[[torch.Tensor, int, Columns], torch.Tensor]
"""Of what the head gave for a row, the row's number and its columns."""


class JoinedLoss:
    """Gradient terms of split rollouts, added to the losses of a batch's rows."""

    def __init__(
        self,
        joined: Join,
        model: ShardedModel,
        loss_and_sums: Callable[[torch.Tensor, Columns], tuple[torch.Tensor, Sums]],
    ):
        """``loss_and_sums(statistics_KS, columns)``: of a row."""
        self.rows, self.sums, self._slices = joined.rows, dict[str, torch.Tensor](), joined.slices
        """``sums``: on the one rank that counts them."""
        if joined.whole is None or joined.statistics_KS is None:
            self._slices, self._gradient_KS = {}, torch.zeros(0)
            return
        leaf_KS = torch.from_numpy(joined.statistics_KS).to(model.device).requires_grad_()
        with torch.enable_grad():
            loss, sums = loss_and_sums(leaf_KS, model.columns(joined.whole))
            [self._gradient_KS] = torch.autograd.grad(loss, [leaf_KS])
        if joined.reports:
            self.sums = sums

    def added_to(self, loss: RowLoss) -> RowLoss:
        """A row's loss, with a term whose gradient is that of split rollouts; the term's value means nothing."""
        return lambda statistics, index, columns: loss(statistics, index, columns) + self._term(statistics, index)

    def _term(self, statistics: torch.Tensor, index: int) -> torch.Tensor | float:
        if not (slices := self._slices.get(index)):
            return 0.0
        statistics_KS = statistics.reshape(-1, statistics.shape[-1])
        used = [k for k, gradient_S in enumerate(self._gradient_KS) if gradient_S.any()]
        terms = [(self._gradient_KS[k, there] * statistics_KS[k, here]).sum() for k in used for here, there in slices]
        return torch.stack(terms).sum() if terms else 0.0


def joined_loss(
    model: ShardedModel,
    rows: list[Row],
    loss_and_sums: Callable[[torch.Tensor, Columns], tuple[torch.Tensor, Sums]],
    keywords_of: Callable[[Columns], dict] = lambda columns: {},
    *,
    is_counted: bool,
) -> JoinedLoss:
    """Joined loss of fitted rows; all ranks call it. ``keywords_of``: further arguments of the head."""
    joined = join(rows, model.device, lambda: model.measure(rows, keywords_of), is_counted=is_counted)
    return JoinedLoss(joined, model, loss_and_sums)
