"""Advantages and weights of made-up rollouts, as the run's own algorithm and packing give them. No actors.

What is wrong with them raises no error: a number is too large or lies at the wrong place, and a policy learns from it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titan_rl.algorithms.batches.batching import checked_advantages, step_batches
from titan_rl.config.mixture import all_tasks, first_name
from titan_rl.controller.preflight.checks import Checked
from titan_rl.data.types import Batch, Group, Provenance, Rollout, Turn
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.environments.interfaces.task import parts_of

_PROMPT = "doctor/made"
_SPLIT = (0, 3)
"""Where each of a made rollout's two conversations begins, if it is cut into two sequences."""
_EXPLODES = 100.0
"""Times the advantages that rewards of the same spread have elsewhere."""
_ROUNDING, _NOTHING = 1e-12, 1e-3
"""Difference of rewards that is rounding, and the share of an ordinary advantage that it may make."""


def made_rollout(number: int, reward: float, *, branches: Sequence[int] = ()) -> Rollout:
    """Two conversations of one token and two of the model's, in one sequence or in two; the last one is paid."""
    first = 10 * number + 10
    return Rollout(
        prompt_id=_PROMPT,
        sample=number,
        tokens=np.array([5, first, first + 1, 5, first + 2, first + 3], np.int32),
        provenance=np.array([Provenance.TEMPLATE, Provenance.MODEL, Provenance.MODEL] * 2, np.int8),
        logprobs=np.array([0, -1, -1] * 2, np.float32),
        versions=np.array([-1, 0, 0] * 2, np.int32),
        turns=[Turn(1, 3, "stop"), Turn(4, 6, "stop")],
        status="ok",
        reward=reward,
        turn_rewards=[0.0, reward],
        branches=list(branches),
    )


def made_batch(checked: Checked, rollouts: list[Rollout]) -> Batch:
    """Batch of one update, packed as in the run."""
    algorithm = replace(checked.config.algorithm, updates_per_batch=1)
    config = replace(checked.config, algorithm=algorithm)
    task = first_name(config.task)
    [batch] = step_batches([Group(_PROMPT, rollouts, task=task)], checked.algorithm, config, checked.titan.layout)
    return batch


def _check_trains_on_rollouts(checked: Checked) -> None:
    if checked.config.data.file:
        raise CheckSkipped("a run on data.file makes no rollouts")


def _parts(batch: Batch) -> dict[int, list[tuple[float, float]]]:
    """By rollout, of each of its sequences the sum of weights, and that of weights times advantages."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for row in (row for rows in batch.rows for row in rows):
        for (_, sample, _), begin, end in zip(row.owners, row.branch_offsets, row.branch_offsets[1:], strict=False):
            weight_S, advantage_S = row.weight_S[begin:end], row.advantage_S[begin:end]
            parts.setdefault(sample, []).append((float(weight_S.sum()), float((weight_S * advantage_S).sum())))
    return parts


async def branches(context: CheckContext) -> str:
    """A rollout weighs the same whatever number of sequences it became, and its reward reaches each of them."""
    _check_trains_on_rollouts(context.checked)
    rewards = [1.0, 0.0, 1.0, 0.0]
    uncut = [made_rollout(number, reward) for number, reward in enumerate(rewards)]
    cut = [replace(rollout, branches=list(_SPLIT) * (rollout.sample < 2)) for rollout in uncut]
    before, after = (_parts(made_batch(context.checked, rollouts)) for rollouts in (uncut, cut))
    for sample in before:
        one, other = (sum(weight for weight, _ in parts[sample]) for parts in (before, after))
        if abs(one - other) > 1e-5 * one:
            evidence = f"rollout {sample} weighs {one:.4g} where no rollout is cut, and {other:.4g} where 0 and 1 are"
            raise CheckFailed("a rollout's weight depends on the number of sequences", evidence)
    paid = {sample: [pay for _, pay in parts] for sample, parts in after.items()}
    if not any(pay for pays in paid.values() for pay in pays) or not _may_branch(context.checked):
        return "rollouts of one and of two sequences weigh the same"
    if min(paid[0]) <= max(paid[1]):
        evidence = f"the two of one that was paid get {_list(paid[0])}, of one that was not {_list(paid[1])}"
        raise CheckFailed("the reward of a rollout does not reach all its sequences", evidence)
    return f"rollouts of one and of two sequences weigh the same, and a reward gives two {_list(paid[0])}"


def _may_branch(checked: Checked) -> bool:
    """Whether a rollout of the task may become several sequences."""
    kinds = {task.name for task in all_tasks(checked.config.task).values()}
    return "verifiers" in kinds or any(part.has_agent for part in parts_of(checked.task))


def _list(values: Sequence[float]) -> str:
    return " and ".join(f"{value:+.3g}" for value in values)


async def magnitude(context: CheckContext) -> str:
    """Rewards that differ by rounding teach what equal ones do, and rewards that cancel teach no more than others."""
    checked = context.checked
    _check_trains_on_rollouts(checked)
    usual = float(np.abs(_advantages(checked, [1.0, 0.0, 0.0])).max())
    if not usual:
        raise CheckSkipped(f"{checked.config.algorithm.name} makes no advantages of rewards")
    alike, almost = (_advantages(checked, [1.0, 1.0 - apart, 1.0]) for apart in (0.0, _ROUNDING))
    if not (noise := float(np.abs(almost - alike).max())) <= _NOTHING * usual:
        evidence = f"rewards 1, 1 - {_ROUNDING:g}, 1 give other advantages than 1, 1, 1: by {noise:.4g}"
        raise CheckFailed(
            "rewards that are equal but for rounding teach something", f"{evidence}; 1, 0, 0 give {usual:.4g}"
        )
    if await _pays_less_than_nothing(context):
        for rewards in ([1.0, -1 / 3, -2 / 3], [1.0, -0.9999]):
            if not (largest := float(np.abs(_advantages(checked, rewards)).max())) <= _EXPLODES * usual:
                listed = ", ".join(f"{reward:.4g}" for reward in rewards)
                evidence = f"rewards {listed} give an advantage of {largest:.4g}; 1, 0, 0 one of {usual:.4g}"
                raise CheckFailed("rewards of both signs that cancel make advantages explode", evidence)
    return f"rewards 1, 0, 0 give advantages of up to {usual:.3g}, and a difference of {_ROUNDING:g} up to {noise:.1g}"


def _advantages(checked: Checked, rewards: list[float]) -> np.ndarray:
    """Of made rollouts, one after the other."""
    rollouts = [made_rollout(number, reward) for number, reward in enumerate(rewards)]
    return np.concatenate([np.atleast_1d(each) for each in checked_advantages(checked.algorithm, rollouts)])


async def _pays_less_than_nothing(context: CheckContext) -> bool:
    """Whether a shaped reward of this run may be negative, as far as it can be told."""
    if context.checked.config.algorithm.overlong_buffer:
        return True
    try:
        earned = await context.earned()
    except (CheckSkipped, CheckFailed):
        return False
    return min(min(rewards) for rewards in earned.by_kind.values()) < 0
