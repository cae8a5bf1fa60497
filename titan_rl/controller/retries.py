"""A group that met a failure of the machinery is sampled again."""

import asyncio
from collections.abc import Awaitable, Callable

from titan_rl.data.types import Group, Prompt, Sampling
from titan_rl.mesh.dispatch import POISON
from titan_rl.mesh.supervision.deadlines import DeadlineError

_PAUSE_SECONDS = 0.5
"""After a first failure in an environment or a score, twice as long after the next: what it needs may be on its way
back."""


async def sampled(
    run_group: Callable[[Prompt, Sampling], Awaitable[Group]],
    prompt: Prompt,
    sampling: Sampling,
    max_retries: int,
    on_retry: Callable[[str], None] = lambda prompt_id: None,
) -> Group:
    """A group, or what is left of the last attempt. ``on_retry`` takes the prompt's id before each further one."""
    attempt = 0
    while True:
        try:
            group = await run_group(prompt, sampling)
        except DeadlineError:
            group = Group(prompt.id, [], refused="timeout")
        is_whole = not group.refused and all(rollout.status != "infra_error" for rollout in group.rollouts)
        if is_whole or group.refused == POISON or attempt >= max_retries:  # poison was tried as often as it may be
            return group
        if not group.refused:
            await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        attempt += 1
        on_retry(prompt.id)
