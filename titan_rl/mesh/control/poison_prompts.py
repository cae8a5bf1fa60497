"""Poison prompts: a prompt that kills its engine is discarded, and its neighbours are not.

    sampled beside others ── the engine dies ──▶ a suspect, sampled alone ── dies again ──▶ poison, which is discarded
                                                          └── is answered ──▶ innocent

So one death is shared by all that were there, and every further one is the suspect's own.
"""

from collections import Counter


class Suspects:
    """Owns how many deaths of one kind of actor each prompt was there at, until the prompt is done."""

    def __init__(self, limit: int):
        """``limit``: deaths that a prompt may be there at, the last of them alone."""
        self._limit = max(limit, 1)
        self._deaths: Counter[str] = Counter()
        self._died_alone: set[str] = set()

    def was_there(self, prompt_id: str, *, alone: bool) -> None:
        """``alone``: nobody else can have been the cause."""
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
        """It is done, or given up."""
        self._deaths.pop(prompt_id, None)
        self._died_alone.discard(prompt_id)
