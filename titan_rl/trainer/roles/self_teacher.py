"""The self-teacher: the policy, which reads a right answer before it judges another one.

Its rows are made here, in the trainer: of each sample with a reprompt, that prompt and the sample's own answer. They go
through the model as rows of their own, and what it says of the answer's tokens becomes columns of the sample's row.

Dimensions: S trained tokens of a row, K words.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from titan_rl.data.batches.packing import dummy_row, pack
from titan_rl.data.storage.sampling_mask import joined
from titan_rl.data.types import Provenance, Row, Sample
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.roles.frozen import FrozenRole, measured, teacher_columns
from titan_rl.trainer.roles.names import FROZEN, TEACHER_MASK, WORDS

_Owner = tuple[str, int]


class SelfTeacher:
    """Finder of a self-teacher's columns."""

    def __init__(self, policy: ShardedModel, num_words: int, initial: FrozenRole | None = None):
        """``num_words``: so many of the likeliest words at each token. ``initial``: the policy as it was at first, if
        that is the teacher."""
        self.policy, self.num_words, self.initial = policy, num_words, initial

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Columns of fitted rows, zeros at tokens of samples without a reprompt.

        Empty on pipeline stages but the last. All ranks call this together."""
        asked = self.policy.fit(self._as_many_everywhere(teacher_rows(rows, self.policy.titan.training.seq_len)))
        found: dict[_Owner, dict[str, np.ndarray]] = {}
        if self.initial is None:
            outputs = measured(self.policy, asked, self.num_words)
        else:
            outputs = self.initial.measure(asked, self.num_words)
        for row, statistics in zip(asked, outputs, strict=True):
            if statistics is None:
                return [{} for _ in rows]
            columns = teacher_columns(FROZEN["teacher"], statistics, self.num_words)
            for (prompt_id, sample, _), part in _parts(row):
                found[prompt_id, sample] = {name: values[part] for name, values in columns.items()}
        return [self._columns(row, found) for row in rows]

    def _as_many_everywhere(self, rows: list[Row]) -> list[Row]:
        """As many rows on each rank: sharded weights are gathered together."""
        count = torch.tensor(max(len(rows), 1), device=self.policy.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return [*rows, *(dummy_row() for _ in range(int(count) - len(rows)))]

    def _columns(self, row: Row, found: dict[_Owner, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        count, words = len(row.target_S), (len(row.target_S), self.num_words)
        columns = {FROZEN["teacher"]: np.zeros(count, np.float32), TEACHER_MASK: np.zeros(count, np.float32)}
        if self.num_words:
            columns |= {WORDS: np.zeros(words, np.int64), "teacher_word_logprob_SK": np.zeros(words, np.float32)}
        for (prompt_id, sample, _), part in _parts(row):
            if (own := found.get((prompt_id, sample))) is not None:
                columns[TEACHER_MASK][part] = 1.0
                for name, values in own.items():
                    columns[name][part] = values
        return columns


def _parts(row: Row) -> list[tuple[tuple[str, int, int], slice]]:
    """Owners of a row, and the trained tokens of each."""
    ends = row.branch_offsets
    return [(owner, slice(int(ends[n]), int(ends[n + 1]))) for n, owner in enumerate(row.owners)]


def teacher_rows(rows: list[Row], row_tokens: int) -> list[Row]:
    """Rows of the samples that have a reprompt: that, and the answer, of which all tokens are trained."""
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        for number, reprompt in enumerate(row.reprompts):
            if reprompt is not None:
                sample = _retold(row, number, reprompt)
                groups.setdefault(sample.prompt_id, []).append(sample)
    if not groups:
        return []
    batch = pack(
        list(groups.values()),
        num_ranks=1,
        row_tokens=row_tokens,
        share_prefix=True,
        weigh=lambda samples: [1.0] * len(samples),
    )
    return [replace(row, advantage_S=np.zeros_like(row.advantage_S)) for row in batch.rows[0]]


def _retold(row: Row, number: int, reprompt: np.ndarray) -> Sample:
    """A sample of a row behind its reprompt."""
    (prompt_id, sample, _), part = _parts(row)[number]
    counts = [len(reprompt), part.stop - part.start]
    return Sample(
        tokens=np.concatenate([reprompt, row.target_S[part]]).astype(np.int32),
        provenance=np.repeat([Provenance.TEMPLATE, Provenance.MODEL], counts).astype(np.int8),
        logprobs=np.concatenate([np.zeros(len(reprompt), np.float32), row.logprob_S[part]]),
        advantage=0.0,
        prompt_id=prompt_id,
        sample=sample,
        mask=joined([None, row.mask and row.mask.take(np.arange(part.start, part.stop))], counts),
    )
