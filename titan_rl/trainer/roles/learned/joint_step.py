"""Joint step of a policy and a learned role: order of updates, and their rollback."""

from collections.abc import Callable, Sequence

from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.roles.learned.role import LearnedRoleInterface, RoleResult, RoleState

Answers = list[StepMetrics | NonfiniteBatch]
Updates = Callable[[Sequence[RoleResult | None], bool], Answers]
"""The policy's updates: arguments are the role's result on each batch, None if its update comes later, and whether the
role is in its warmup."""


def joint_step(role: LearnedRoleInterface, batches: list[list[Row]], updates: Updates) -> Answers:
    """Update the policy and its learned role; the role's updates are undone where the policy's fail."""
    waits = role.is_warming_up
    if not role.learns_first:
        answers = updates([None] * len(batches), waits)
    else:
        state, results = role.saved_state(), [role.learn(rows) for rows in batches]
        answers = updates(results, waits)
        _settle(role, state, batches, results, answers)
    role.end_step()
    return answers


def _settle(
    role: LearnedRoleInterface,
    state: RoleState,
    batches: Sequence[list[Row]],
    results: Sequence[RoleResult],
    answers: Answers,
) -> None:
    """If the policy could not apply all that the role learned from, that goes back to where it was, and learns only
    what was applied."""
    if _were_finite(results) == _were_finite(answers):
        return
    role.restore(state)
    for rows, answer in zip(batches, answers, strict=True):
        if not isinstance(answer, NonfiniteBatch):
            role.learn(rows)


def _were_finite(results: Sequence[StepMetrics | RoleResult]) -> list[bool]:
    return [not isinstance(result, NonfiniteBatch) for result in results]
