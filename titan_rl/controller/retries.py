"""A group that met a failure of the machinery is sampled again."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from math import inf

from titan_rl.data.types import Group, Prompt, Sampling, Status
from titan_rl.mesh.control.dispatcher import POISON
from titan_rl.mesh.control.repeated_faults import FaultsInARow
from titan_rl.mesh.processes.deadlines import DeadlineError

_PAUSE_SECONDS = 0.5
"""After a first failure in an environment or a score, twice as long after the next: what it needs may be on its way
back."""

_SLOW = "no answer was in time; mend what is slow, or raise verifier.score_timeout, or verifier.step_timeout"


async def sampled(
    run_group: Callable[[Prompt, Sampling], Awaitable[Group]],
    prompt: Prompt,
    sampling: Sampling,
    max_retries: int,
    faults: FaultsInARow,
    on_retry: Callable[[str], None] = lambda prompt_id: None,
) -> Group:
    """A group, or what is left of the last attempt. ``on_retry`` takes the prompt's id before each further one.

    Errors: EveryPromptFails if this is one prompt too many that nothing but one failure came of.
    """
    attempt, began = 0, time.monotonic()
    while True:
        try:
            group = await run_group(prompt, sampling)
        except DeadlineError as error:
            faults.given_up(prompt.id, str(error), inf)  # nobody was there to work, of which no prompt is the cause
            group = Group(prompt.id, [], refused="timeout")
        is_whole = not group.refused and all(rollout.status != "infra_error" for rollout in group.rollouts)
        if is_whole and (why := _only_failure(group, "timeout")):
            faults.given_up(prompt.id, f"{why}: {_SLOW}", began)
        if is_whole or group.refused == POISON:  # which was tried as often as it may be
            return group
        if attempt >= max_retries:
            if why := _only_failure(group, "infra_error"):
                faults.given_up(prompt.id, why, began)
            return group
        if not group.refused:
            await asyncio.sleep(_PAUSE_SECONDS * 2**attempt * faults.patience)
        attempt += 1
        on_retry(prompt.id)


def _only_failure(group: Group, status: Status) -> str:
    """The commonest, if all samples have this status."""
    if group.refused or not group.rollouts or any(rollout.status != status for rollout in group.rollouts):
        return ""
    [(failure, _)] = Counter(rollout.failure or status for rollout in group.rollouts).most_common(1)
    return failure
