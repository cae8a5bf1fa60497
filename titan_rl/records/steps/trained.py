"""Per-token results of the trainer for each trained step, one Parquet file a step.

    trained/step-000003.parquet    prompt_id, sample, trainer_logprobs [M], advantages [M], update; and of each rollout
                                   the means: disagreement (of |trainer logprob - sampling logprob|) and advantage

Log-probabilities are of the weights before the update, so they are what the agreement with the generator is made of.
In a step's later updates they also have the policy's movement in the earlier ones, which the agreement leaves out.
A run that was driven by a loop of one's own, or began before there were such files, has none.

Dimensions: T tokens of a rollout, M of them the model's, S trained tokens of a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.data.storage.files import replacing, wanting
from titan_rl.data.storage.tables import check_table, read_table
from titan_rl.data.types import Batch, Group, Rollout, Row, is_model
from titan_rl.mesh.telemetry.step_record import TokenResults
from titan_rl.records.steps.step_names import step_name

SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample": pa.int32(),
        "trainer_logprobs": pa.list_(pa.float32()),
        "advantages": pa.list_(pa.float32()),
        "update": pa.int32(),
        "disagreement": pa.float64(),
        "advantage": pa.float64(),
    }
)


@dataclass(frozen=True)
class Piece:
    """A sample's trained tokens as they stand in a row: all of them, or those of one branch."""

    sampling: np.ndarray
    trainer: np.ndarray
    advantages: np.ndarray
    update: int


def pieces(batches: Sequence[Batch], values_of_rows: TokenResults) -> dict[tuple[str, int], list[Piece]]:
    """Trained pieces of each prompt and sample."""
    pieces_of: dict[tuple[str, int], list[Piece]] = {}
    for update, (batch, of_rows) in enumerate(zip(batches, values_of_rows, strict=False)):
        for group, rows in enumerate(batch.rows):
            for place, row in enumerate(rows):
                if (values := of_rows.get((group, place))) is not None:
                    for name, piece in _of_row(row, values, update):
                        pieces_of.setdefault(name, []).append(piece)
    return pieces_of


def _of_row(row: Row, values: np.ndarray, update: int) -> Iterator[tuple[tuple[str, int], Piece]]:
    """``values``: a mesh.telemetry.step_record.RowResults."""
    advantage_S = values[1] if len(values) > 1 else row.advantage_S
    start = 0
    for prompt_id, sample, count in row.owners:
        own = slice(start, start + count)
        yield (prompt_id, sample), Piece(row.logprob_S[own], values[0][own], advantage_S[own], update)
        start += count


def in_order(rollout: Rollout, own: Iterable[Piece]) -> list[Piece] | None:
    """Trained pieces of a rollout in branch order, matched by their sampling log-probabilities; None where they do not
    fit."""
    left, ordered = list(own), []
    for start, stop in rollout.spans:
        sampled = rollout.logprobs[start:stop][is_model(rollout.provenance[start:stop])]
        if not len(sampled):
            continue
        fits = (n for n, piece in enumerate(left) if np.array_equal(piece.sampling, sampled))
        if (place := next(fits, None)) is None:
            return None
        ordered.append(left.pop(place))
    return ordered or None


def trained_rows(groups: Iterable[Group], pieces_of: Mapping[tuple[str, int], list[Piece]]) -> list[dict[str, Any]]:
    """Per-token results, arrays [M], of each trained rollout."""
    rows = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ordered = in_order(rollout, pieces_of.get((rollout.prompt_id, rollout.sample), ()))
        if ordered is not None:
            sampling, trainer, advantages = (
                np.concatenate([getattr(piece, name) for piece in ordered])
                for name in ("sampling", "trainer", "advantages")
            )
            rows.append(
                {
                    "prompt_id": rollout.prompt_id,
                    "sample": rollout.sample,
                    "trainer_logprobs": trainer,
                    "advantages": advantages,
                    "update": ordered[0].update,
                    "disagreement": float(np.abs(trainer - sampling).mean(dtype=np.float64)),
                    "advantage": float(advantages.mean(dtype=np.float64)),
                }
            )
    return rows


def read_trained(folder: Path, step: int, prompt_id: str, sample: int) -> dict[str, Any] | None:
    """Per-token results of one rollout, arrays [M]; None where there are none. Errors: OSError, RefusedFile or
    pyarrow.ArrowException for a damaged file."""
    path = folder / f"{step_name(step)}.parquet"
    if not path.is_file() or path.is_symlink():
        return None
    check_table(path)
    rows = read_table(path, SCHEMA, prompt_id=prompt_id, sample=sample).to_pylist()
    return rows[0] if rows else None


def write_trained(
    folder: Path, step: int, groups: Iterable[Group], batches: Sequence[Batch], values_of_rows: TokenResults
) -> None:
    """Write a step's per-token results, if there are any. Errors: DiskFull."""
    if not (rows := trained_rows(groups, pieces(batches, values_of_rows))):
        return
    folder.mkdir(exist_ok=True)
    columns = {name: [row[name] for row in rows] for name in SCHEMA.names}
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pydict(columns, SCHEMA), buffer)
    data, path = buffer.getvalue(), folder / f"{step_name(step)}.parquet"
    with wanting(path, data.size), replacing(path) as writing:
        writing.write_bytes(data)
