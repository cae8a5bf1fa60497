"""Joint step of a policy and a learned role: order of updates, and their rollback."""

from collections.abc import Callable, Sequence

from titan_rl.data.nonfinite import BadNumbers
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.roles.learned_role import Kept, Taught, Told

Answers = list[StepMetrics | BadNumbers]
Updates = Callable[[Sequence[Told | None], bool], Answers]
"""The policy's, of each batch: given what came of the role's own update on it, if that was made before, and whether the
role still learns alone."""


def taught_step(role: Taught, batches: list[list[Row]], updates: Updates) -> Answers:
    waits = role.learns_alone
    if not role.learns_first:
        answers = updates([None] * len(batches), waits)
    else:
        kept, told = role.kept(), [role.learn(rows) for rows in batches]
        answers = updates(told, waits)
        _settle(role, kept, batches, told, answers)
    role.end_step()
    return answers


def _settle(
    role: Taught,
    kept: Kept,
    batches: Sequence[list[Row]],
    told: Sequence[Told],
    answers: Answers,
) -> None:
    """If the policy could not apply all that the role learned from, that goes back to where it was, and learns only
    what was applied."""
    if [isinstance(one, BadNumbers) for one in told] == [isinstance(one, BadNumbers) for one in answers]:
        return
    role.put_back(kept)
    for rows, answer in zip(batches, answers, strict=True):
        if not isinstance(answer, BadNumbers):
            role.learn(rows)
