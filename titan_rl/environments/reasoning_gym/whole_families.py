"""reasoning-gym families built entry by entry, each entry in a dataset with its own seed."""

from functools import lru_cache
from typing import Any

from titan_rl.compat.reasoning_gym import create_dataset
from titan_rl.data.seeds import named_seed

_SEEDS = 2**31
_KEPT = 4096
"""Entries that are asked for again when their answers are scored; one takes up to a twentieth of a second to make."""


class WholeFamily:
    """Endless entries by index, as in other families' datasets."""

    def __init__(self, name: str, seed: int, **options: Any):
        self.name, self.seed, self.options = name, seed, options
        self._scorer = self._dataset(0)
        self._entry = lru_cache(maxsize=_KEPT)(lambda index: self._dataset(index)[0])

    def _dataset(self, index: int) -> Any:
        seed = named_seed(self.name, self.seed, index) % _SEEDS
        return create_dataset(self.name, seed=seed, size=1, **self.options)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._entry(index)

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return self._scorer.score_answer(answer=answer, entry=entry)
