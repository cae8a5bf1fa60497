"""The loss and its gradient are the same however samples are packed."""

from dataclasses import replace

from titan_rl.data.types import Batch, Group, Rollout
from titan_rl.diagnostics.doctor.findings import NotLookedAt, Wrong
from titan_rl.diagnostics.doctor.visit import Visit

_GROUPS, _SAMPLES = 2, 4
_EXACT, _ROUNDED = 1e-3, 0.1
"""Relative difference of gradient norms that rounding explains, in fp32 and in bf16."""


async def layout(visit: Visit) -> str:
    """As the run packs them, and each sample in a row of its own, in another order."""
    patient = visit.patient
    groups = [_rewarded(group) for group in (await visit.groups())[:_GROUPS]]
    packed, alone = patient.batch(groups), patient.batch(groups, one_by_one=True)
    first, second = (await patient.read(packed)).metrics, (await patient.read(alone)).metrics
    if not first.grad_norm:
        raise NotLookedAt("the loss of this algorithm has no gradient on these answers")
    allowed = _EXACT if visit.limits.token < 1 else _ROUNDED
    weights = (float(abs(row.weight_S * row.advantage_S).sum()) for rows in packed.rows for row in rows)
    scale = max(abs(first.loss), sum(weights))
    apart = abs(first.grad_norm - second.grad_norm) / first.grad_norm, abs(first.loss - second.loss) / max(scale, 1e-6)
    seen = (
        f"{_rows(packed)} rows and {_rows(alone)} rows: loss {first.loss:.6f} and {second.loss:.6f}, gradient norm "
        f"{first.grad_norm:.6f} and {second.grad_norm:.6f}"
    )
    if max(apart) > allowed:
        raise Wrong("the same samples give another loss when they are packed in another way", seen)
    return seen


def _rewarded(group: Group) -> Group:
    """Its first samples, one of them right, so that there is something to learn."""
    return replace(group, rollouts=[_paid(r, float(n == 1)) for n, r in enumerate(group.rollouts[:_SAMPLES])])


def _paid(rollout: Rollout, reward: float) -> Rollout:
    turns = [0.0] * (len(rollout.turns) - 1) + [reward]
    task_reward = None if rollout.task_reward is None else reward
    return replace(rollout, reward=reward, turn_rewards=turns, task_reward=task_reward, seat="")


def _rows(batch: Batch) -> int:
    return sum(map(len, batch.rows))
