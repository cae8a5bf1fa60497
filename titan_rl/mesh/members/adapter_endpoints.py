"""Endpoints of ``actors.adapter_trainer.AdapterTrainer`` as stubs, and what travels to them and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from titan_rl.mesh.channel.batches import RowsHandle
from titan_rl.mesh.supervision.remote_call import stub

T = TypeVar("T")


@dataclass(frozen=True)
class Answered(Generic[T]):
    """Answer of a rank, or why the request is refused."""

    value: T | None
    refusal: str = ""


@dataclass(frozen=True)
class AdamSettings:
    """Settings of one AdamW step, as torch.optim.AdamW names them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    """Gradients are clipped to this norm; 0: not."""


@dataclass(frozen=True)
class PassResult:
    """Result of a pass over a rank's rows."""

    loss: float
    """Sum over all ranks' tokens."""
    group: int
    """Number of the group of ranks whose rows these are."""
    logprobs: dict[int, np.ndarray]
    """Of each row by its number, float32 [S]; empty where another rank reports them."""


class AdapterEndpoints:
    """Endpoints besides those of ``TrainerEndpoints``."""

    @stub
    def create_adapter(self, name: str, seed: int) -> None: ...

    @stub
    def forget_adapter(self, name: str) -> None: ...

    @stub
    def adapter_pass(
        self, name: str, rows: list[RowsHandle], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Answered[PassResult]: ...

    @stub
    def adapter_step(self, name: str, settings: AdamSettings) -> Answered[float]: ...

    @stub
    def save_adapter_state(self, name: str, file: str) -> None: ...

    @stub
    def restore_adapter_state(self, name: str, file: str, with_optimizer: bool) -> Answered[None]: ...

    @stub
    def save_adapter_weights(self, name: str, folder: str) -> None: ...

    @stub
    def load_adapter_weights(self, name: str, folder: str) -> Answered[None]: ...
