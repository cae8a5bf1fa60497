"""Decoding settings of an engine, and where a packed row has the words before each penalized token.

With penalties vLLM changes logits by the words of a request's prompt and of its answer so far. Both are tokens of the
row itself, so where they lie, and where answers begin, is all that the trainer needs to compute the same logits; see
models/layers/penalties.py.
"""

from dataclasses import dataclass


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
    stop_tokens: tuple[int, ...] | None = None
    """Tokens after which an answer ends, which are its last ones; None: the model's own."""
    repetition_penalty: float = 1.0
    """Of words in prompt or answer: logits above 0 are divided by it, others multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of words in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from them as often as the answer has the word."""
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
class PenalizedSample:
    """Sample of a packed row whose trained tokens were drawn from penalized logits."""

    penalties: Penalties
    ranges: tuple[tuple[int, int], ...]
    """(start, length) of its tokens in the row, of all but its last, in order."""
    starts: tuple[int, ...]
    """Places in the sample where its answers begin, ascending: all before that was the request's prompt."""
