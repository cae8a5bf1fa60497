"""The loss and its gradient: the same however samples are packed, and blind to what weighs nothing."""

from dataclasses import replace
from functools import partial

from titan_rl.algorithms.batches.batching import data_batch
from titan_rl.data.types import Batch, Group, Rollout, Row
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.checks.arithmetic import made_batch, made_rollout
from titan_rl.diagnostics.doctor.context import CheckContext

_GROUPS, _SAMPLES = 2, 4
_EXACT, _ROUNDED = 1e-3, 0.1
"""Relative difference of gradient norms that rounding explains, in fp32 and in bf16."""


async def layout(context: CheckContext) -> str:
    """Comparison of loss and gradient norm, packed as in the run and one sample a row."""
    actors = context.actors
    groups = [_rewarded(group) for group in (await context.groups())[:_GROUPS]]
    packed, alone = actors.batch(groups), actors.batch(groups, one_by_one=True)
    first, second = (await actors.read(packed)).metrics, (await actors.read(alone)).metrics
    if not first.grad_norm:
        raise CheckSkipped("the loss of this algorithm has no gradient on these answers")
    allowed = _EXACT if context.limits.token < 1 else _ROUNDED
    weights = (float(abs(row.weight_S * row.advantage_S).sum()) for rows in packed.rows for row in rows)
    scale = max(abs(first.loss), sum(weights))
    apart = abs(first.grad_norm - second.grad_norm) / first.grad_norm, abs(first.loss - second.loss) / max(scale, 1e-6)
    summary = (
        f"{_rows(packed)} rows and {_rows(alone)} rows: loss {first.loss:.6f} and {second.loss:.6f}, gradient norm "
        f"{first.grad_norm:.6f} and {second.grad_norm:.6f}"
    )
    if max(apart) > allowed:
        raise CheckFailed("the same samples give another loss when they are packed in another way", summary)
    return summary


async def unweighed(context: CheckContext) -> str:
    """A token that weighs nothing makes nothing NaN, even if it has no log-probability."""
    if context.checked.algorithm.head == "value":
        raise CheckSkipped("the trained model gives values, not log-probabilities")
    row = _row_of_two(_some_batch(context))
    nan_parts = sorted(
        {what for rank in await context.actors.ask_trainer(partial(probes.unweighed_nan, row=row)) for what in rank}
    )
    if nan_parts:
        raise CheckFailed(
            f"a token of weight 0 makes the {' and the '.join(nan_parts)} NaN", "its log-probability is NaN"
        )
    return f"one of {len(row.weight_S)} tokens of a row has weight 0 and NaN, and loss and gradient are finite"


def _some_batch(context: CheckContext) -> Batch:
    checked = context.checked
    if checked.dataset is not None:
        return data_batch(checked.dataset.train[:2], checked.algorithm, checked.config, checked.titan.layout)
    return made_batch(checked, [made_rollout(number, float(number == 1)) for number in range(3)])


def _row_of_two(batch: Batch) -> Row:
    """Errors: CheckSkipped where each row has one trained token at most."""
    for row in (row for rows in batch.rows for row in rows):
        if len(row.weight_S) > 1:
            return row
    raise CheckSkipped("no row has two trained tokens")


def _rewarded(group: Group) -> Group:
    """Its first samples, one of them right, so that there is something to learn."""
    return replace(group, rollouts=[_paid(r, float(n == 1)) for n, r in enumerate(group.rollouts[:_SAMPLES])])


def _paid(rollout: Rollout, reward: float) -> Rollout:
    turns = [0.0] * (len(rollout.turns) - 1) + [reward]
    task_reward = None if rollout.task_reward is None else reward
    return replace(rollout, reward=reward, turn_rewards=turns, task_reward=task_reward, seat="")


def _rows(batch: Batch) -> int:
    return sum(map(len, batch.rows))
