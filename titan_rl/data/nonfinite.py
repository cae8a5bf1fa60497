"""What of a batch is not a finite number, and whose it is. It travels in messages."""

from dataclasses import dataclass

_MAX_NAMED = 8
"""Samples that a message about non-finite values names."""


@dataclass(frozen=True)
class Culprit:
    """A sample, and what of it is not a finite number."""

    prompt_id: str
    """Or the place of a row of data."""
    sample: int | None
    """None: all of a row's, which are left out together."""
    what: str
    """``sampling logprob``, ``logprob`` or a ``value``, ``loss`` or ``gradient``: the first that is not finite; of a
    pair with the answer that it is of, if it is one alone."""

    def __str__(self) -> str:
        return f"{self.what} of {self.prompt_id}" + ("" if self.sample is None else f" sample {self.sample}")


@dataclass(frozen=True)
class NonfiniteBatch:
    """Instead of StepMetrics: a batch that was not applied, since its loss or gradient is not finite."""

    reason: str
    culprits: list[Culprit]
    weights: list[str]
    """The first few weights that are not finite themselves; then no batch can do better."""
    num_weights: int

    def __str__(self) -> str:
        if self.weights:
            return f"{self.reason}: {self.num_weights} weights are not finite, first {', '.join(self.weights)}"
        named = [str(culprit) for culprit in self.culprits[:_MAX_NAMED]]
        more = f" and {len(self.culprits) - _MAX_NAMED} more samples" if len(self.culprits) > _MAX_NAMED else ""
        return f"{self.reason}: {', '.join(named) + more or 'no sample by itself'}"
