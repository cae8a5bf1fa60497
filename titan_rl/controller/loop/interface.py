"""The loop that a session drives: controller.py has it for a run with generators, offline/ for one on data.

A loop owns the order of things and nothing else. Errors of all coroutines but ``rescue``: Stopped once a stop was asked
for, NonfiniteBatchesError, or an actor's fault.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from titan_rl.algorithms.base import Algorithm
from titan_rl.controller.preflight.live_settings import Effects
from titan_rl.controller.recovery.checkpointing import Checkpointing
from titan_rl.records.statistics import Proportion


@dataclass(frozen=True)
class HeldOut:
    """Loss and accuracy on held-out data."""

    metrics: dict[str, float]
    """The loss, and means over examples of what it counts."""
    accuracy: Proportion | None
    """Of pairs: how often the chosen answer has the larger reward."""


class Loop(Protocol):
    """Interface of both loops; as a base class it refuses one without a method."""

    checkpointing: Checkpointing

    @abstractmethod
    async def begin(self) -> None:
        """A run's state before its first step."""
        ...

    @abstractmethod
    async def resume(self) -> None:
        """The state that the run's records say it was in, from the newest checkpoint or from the beginning."""
        ...

    @abstractmethod
    async def step(self) -> None:
        """Run one step, and the evaluation or checkpoint due after it."""
        ...

    @abstractmethod
    async def reported(self) -> None:
        """Wait until the last step's metrics are written."""
        ...

    @abstractmethod
    async def evaluate(self, when: str) -> Proportion | HeldOut:
        """Held-out accuracy, or loss and accuracy on held-out data. ``when``: in words, for people."""
        ...

    @abstractmethod
    async def save(self) -> None:
        """Begin a checkpoint of the step at hand; ``checkpointing.finish`` waits for it."""
        ...

    @abstractmethod
    async def take_settings(self, algorithm: Algorithm, effects: Effects) -> None:
        """Take up settings that changed between two steps, of which the newest checkpoint is the last."""
        ...

    @abstractmethod
    async def finish(self) -> None:
        """Evaluate, save a checkpoint and export a Hugging Face directory after the last step."""
        ...

    @abstractmethod
    async def rescue(self, error: BaseException) -> None:
        """Save what is new, if the trainer is between two steps. ``error``: what ended the run. Raises no fault."""
        ...

    @abstractmethod
    def cancel(self) -> None:
        """Cancel work beside the current step."""
        ...
