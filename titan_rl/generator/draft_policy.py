"""Whether drafts are worth their time, at each size of a batch.

A draft of K tokens is checked in one pass of the model over 1 + K tokens for each request. Where a pass over few tokens
is bound by memory, it costs about as much as one over a single token; in large batches, and on CPUs, it may cost
1 + K times that. Which one it is, and how many tokens are accepted, is measured on the steps themselves.
"""

from dataclasses import dataclass, field

_BLOCK_STEPS = 8
_CHOSEN_BLOCKS = 16
"""For so many blocks the choice stays; then the other number is measured again for one."""
_KEPT = 0.5
"""Weight of the rate before, each time that one is measured again: models and answers change."""


@dataclass
class _Size:
    """What is known of batches of about one size."""

    limit: int
    """Tokens that are drafted at present."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and new tokens of each step of the block at hand."""
    rates: dict[int, float] = field(default_factory=dict)
    """Tokens a second, by number of drafted tokens."""
    num_blocks: int = 0
    """That have ended."""


class DraftPolicy:
    """Owner of what was measured, and of the choice at each batch size."""

    def __init__(self, num_tokens: int):
        """``num_tokens``: drafted for a request where it pays."""
        self._num_tokens = num_tokens
        self._sizes: dict[int, _Size] = {}

    def measured(self, batch: int, limit: int, seconds: float, num_tokens: int) -> tuple[range, int] | None:
        """A step without prompts: requests, most drafted tokens of each, seconds, and new tokens of all.

        Returns batch sizes and how many tokens to draft for them from now on, or None if nothing changes."""
        exponent = batch.bit_length()
        size = self._sizes.setdefault(exponent, _Size(self._num_tokens))
        if limit != size.limit:  # it was begun before the last change
            return None
        size.steps.append((seconds, num_tokens))
        if len(size.steps) < _BLOCK_STEPS:
            return None
        self._end_block(size)
        if size.limit == limit:
            return None
        return range(1 << (exponent - 1), 1 << exponent), size.limit

    def _end_block(self, size: _Size) -> None:
        # of all steps: the slow ones may be those that had drafts
        rate = sum(tokens for _, tokens in size.steps) / max(sum(seconds for seconds, _ in size.steps), 1e-9)
        before = size.rates.get(size.limit, rate)
        size.rates[size.limit] = _KEPT * before + (1 - _KEPT) * rate
        size.steps, size.num_blocks = [], size.num_blocks + 1
        other = self._num_tokens - size.limit
        is_due = other not in size.rates or size.num_blocks % _CHOSEN_BLOCKS == 0
        if is_due or size.rates[other] > size.rates[size.limit]:
            size.limit = other
