"""Callbacks that a run passes to its parts: log lines, events and step metrics."""

from typing import Any, Protocol


class Log(Protocol):
    """Takes a line for people, which the display shows and the run's log keeps."""

    def __call__(self, text: str, /) -> None: ...


class RecordEvent(Protocol):
    """Takes an event for the run's records; its fields are what JSON can hold."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


class RecordMetrics(Protocol):
    """Takes what a step measured, by name; ``step`` is the step's number. Errors: DiskFull."""

    def __call__(self, record: dict[str, float], /) -> None: ...


class OnLoss(Protocol):
    """Takes the loss of a supervised step; the first step is 1."""

    def __call__(self, step: int, loss: float, /) -> None: ...


def ignore_loss(step: int, loss: float) -> None:
    """``OnLoss`` of who does not want it."""
