"""The trainer actor of a service: one rank of the base model, and the adapters of all clients."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monarch.actor import endpoint

from titan_rl.actors.trainer import Trainer
from titan_rl.mesh.channel.batches import RowsHandle
from titan_rl.mesh.members.adapter_endpoints import AdamSettings, Answered, PassResult
from titan_rl.mesh.processes.fault_injection import inject_fault

if TYPE_CHECKING:  # a process has these imported once it has joined
    from titan_rl.trainer.step.adapter_bank import AdapterBank
    from titan_rl.trainer.step.learner import Learner

T = TypeVar("T")


class AdapterTrainer(Trainer):
    """Trainer rank that holds several adapters (trainer/step/adapter_bank.py).

    What a client got wrong is an answer, not an error: a rank that raises would be replaced."""

    _banked: "tuple[Learner, AdapterBank] | None" = None

    @property
    def bank(self) -> "AdapterBank":
        """Adapters on this learner; none at first, and after each ``join``."""
        from titan_rl.trainer.step.adapter_bank import AdapterBank

        if self._banked is None or self._banked[0] is not self.policy_side:
            self._banked = self.policy_side, AdapterBank(self.policy_side)
        return self._banked[1]

    def _answered(self, work: Callable[[], T]) -> Answered[T]:
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        with leave_group_on_error():
            inject_fault()
            try:
                return Answered(work())
            except (FloatingPointError, ValueError) as error:
                return Answered(None, str(error))

    @endpoint
    def create_adapter(self, name: str, seed: int) -> None:
        """Create a client's adapter, which changes nothing at first."""
        self.bank.create(name, seed)

    @endpoint
    def forget_adapter(self, name: str) -> None:
        self.bank.forget(name)

    @endpoint
    def adapter_pass(
        self, name: str, rows: list[RowsHandle], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Answered[PassResult]:
        """Pass over this rank's rows; ``rows[group]`` holds a group's."""
        [pulled] = self._pull(rows)
        return self._answered(lambda: self.bank.forward_backward(name, pulled, loss, settings, backward=backward))

    @endpoint
    def adapter_step(self, name: str, settings: AdamSettings) -> Answered[float]:
        """AdamW step of a client; the gradients' norm."""
        return self._answered(lambda: self.bank.step(name, settings))

    @endpoint
    def save_adapter_state(self, name: str, file: str) -> None:
        """Write weights and moments of a client."""
        self.bank.save(name, Path(file))

    @endpoint
    def restore_adapter_state(self, name: str, file: str, with_optimizer: bool) -> Answered[None]:
        """Load what ``save_adapter_state`` wrote."""
        return self._answered(lambda: self.bank.restore(name, Path(file), with_optimizer=with_optimizer))

    @endpoint
    def save_adapter_weights(self, name: str, folder: str) -> None:
        """Write a client's adapter in PEFT's format."""
        self.bank.save_weights(name, Path(folder))

    @endpoint
    def load_adapter_weights(self, name: str, folder: str) -> Answered[None]:
        """Replace a client's weights by those of a PEFT directory."""
        return self._answered(lambda: self.bank.load_weights(name, Path(folder)))
