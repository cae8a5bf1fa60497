"""Decoding settings of an engine, and what a packed row knows of the words before each penalized token.

With penalties vLLM changes logits by the words of a request's prompt and of its answer so far. Both are tokens of the
sample itself, so its tokens, and where its answers begin, are all that the trainer needs to compute the same logits;
see models/layers/penalties.py.

Dimensions: T tokens of a sample, S its trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Penalties:
    """Penalties of sampled logits, as vLLM names them; by default none changes anything."""

    repetition: float = 1.0
    """Logits above 0 are divided, others multiplied by it, of words in prompt or answer."""
    presence: float = 0.0
    """Subtracted from the logits of words in the answer."""
    frequency: float = 0.0
    """Subtracted from them as often as the answer has the word."""

    @property
    def are_on(self) -> bool:
        return self != Penalties()


@dataclass(frozen=True)
class Decoding:
    """Decoding settings of an engine besides the temperature, as vLLM names them; by default none changes anything."""

    top_p: float = 1.0
    """Sample from the fewest tokens that have this probability together."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: float = 0.0
    """Sample from tokens at least this share as likely as the likeliest one."""
    stop: tuple[str, ...] = ()
    """Texts after which an answer ends; they are its last part."""
    repetition_penalty: float = 1.0
    """Penalties follow what was written before, which the trainer has, too."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    thinking_budget: int = 0
    """Most tokens of a section of thinking, which is closed then; 0: no limit."""

    @property
    def penalties(self) -> Penalties | None:
        """Penalties that change logits; None if there are none."""
        penalties = Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties if penalties.are_on else None

    @property
    def truncates(self) -> bool:
        """Whether anything is cut away from the distribution, so that a mask of the rest must travel."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True)
class PenalizedTokens:
    """Trained tokens of one sample, each drawn from logits that were penalized for what came before it."""

    penalties: Penalties
    tokens: np.ndarray
    """int32 [T]: all of the sample."""
    place_S: np.ndarray
    """int64 [S], ascending: place of each trained token in the sample."""
    start_S: np.ndarray
    """int64 [S]: place where the answer begins that it is in; all before that was the request's prompt."""

    @classmethod
    def of(cls, penalties: Penalties, tokens: np.ndarray, places: np.ndarray, starts: Sequence[int]):
        """``starts``: of the sample's answers, ascending. Errors: ValueError for a trained token before the first."""
        if len(places) and (not len(starts) or places[0] < starts[0]):
            raise ValueError(f"token {places[0]} was sampled with penalties, and no answer begins before it")
        start_S = np.asarray(starts, np.int64)[np.searchsorted(starts, places, side="right") - 1]
        return cls(penalties, tokens, places.astype(np.int64), start_S)
