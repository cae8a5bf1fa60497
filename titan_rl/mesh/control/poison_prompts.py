"""Poison prompts are discarded; a fault that every prompt meets ends the run.

A prompt that kills its engine must not end the run, nor take its neighbours along:

    sampled beside others ── the engine dies ──▶ a suspect, sampled alone ── dies again ──▶ poison, which is discarded
                                                          └── is answered ──▶ innocent

So one death is shared by all that were there, and every further one is the suspect's own.
"""

import re
import time
from collections import Counter

from titan_rl.config.errors import NamedFault
from titan_rl.mesh.supervision.actor_process import ActorFault


class PoisonPrompts:
    """Deaths of one kind of actor by prompt in flight, to find poison prompts."""

    def __init__(self, limit: int):
        """``limit``: deaths that a prompt may be there at, the last of them alone."""
        self._limit = max(limit, 1)
        self._deaths: Counter[str] = Counter()
        self._died_alone: set[str] = set()

    def count_death(self, prompt_id: str, *, alone: bool) -> None:
        """Count a death for a prompt in flight. ``alone``: no other prompt can be the cause."""
        self._deaths[prompt_id] += 1
        if alone:
            self._died_alone.add(prompt_id)

    def is_suspect(self, prompt_id: str) -> bool:
        return prompt_id in self._deaths

    def is_poison(self, prompt_id: str) -> bool:
        return self._deaths.get(prompt_id, 0) >= self._limit and prompt_id in self._died_alone

    def num_deaths(self, prompt_id: str) -> int:
        return self._deaths.get(prompt_id, 0)

    def forget(self, prompt_id: str) -> None:
        """Drop the counts of a finished prompt."""
        self._deaths.pop(prompt_id, None)
        self._died_alone.discard(prompt_id)


NUM_PROMPTS = 3
_PAUSE_FACTOR = 4
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class EveryPromptFails(ActorFault, NamedFault):
    """Consecutive failures of different prompts for one reason."""


class ConsecutiveFailures:
    """Consecutively failed prompts since the last success.

        a prompt is given up ──▶ another, begun after that, is for the same reason ──▶ a third is ──▶ the run ends
                  └──────────────── any prompt is answered: none in a row ◀───────────────┘

    Prompts that are under way together count as one: what they need may be away for a moment. Each of the three has had
    all its retries; samples that were too slow have none, and count where all of a group were.
    """

    def __init__(self) -> None:
        self._prompts: list[str] = []
        self._reason, self._since = "", 0.0
        self._ended: EveryPromptFails | None = None

    def record_success(self) -> None:
        """Reset the count: a prompt has a sample without infrastructure error or timeout."""
        self._prompts.clear()

    def record_failure(self, prompt_id: str, reason: str, began: float) -> None:
        """Record a failed prompt. ``began``: its last attempt (``time.monotonic``). Errors: EveryPromptFails."""
        self.check()
        reason = _ADDRESS.sub("0x...", reason.replace(prompt_id, "a prompt"))
        if self._prompts and reason == self._reason:
            if prompt_id in self._prompts or began < self._since:
                return
        else:
            self._prompts.clear()
        self._prompts.append(prompt_id)
        self._reason, self._since = reason, time.monotonic()
        if len(self._prompts) == NUM_PROMPTS:
            names = ", ".join(self._prompts)
            self._ended = EveryPromptFails(
                f"{NUM_PROMPTS} prompts in a row ({names}) failed for the same reason: {reason}"
            )
        self.check()

    def check(self) -> None:
        """Raise EveryPromptFails again once it was raised."""
        if self._ended is not None:
            raise self._ended

    @property
    def patience(self) -> float:
        """Factor on the pause before a retry; grows with consecutive failures."""
        return float(_PAUSE_FACTOR ** len(self._prompts))
