"""The role actor: one rank of a model that never learns, in processes of its own (trainer/roles/frozen_worker.py)."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from titan_rl.config.sections.schema import Config
from titan_rl.mesh.channel.batches import RowsHandle, StagedRows, pull_rows

if TYPE_CHECKING:  # it needs torch
    from titan_rl.trainer.roles.frozen_worker import FrozenRoleWorker


class Role(Actor):
    """Rank of a frozen role.

    All ranks of a role are called together, in the same order, since each call may hold collectives.
    """

    IMPORTS = "trainer"

    def __init__(self, role: str, model_path: str, kept: str):
        """``kept``: where the run keeps the policy (``trainer.roles.names.role_paths``)."""
        self.role, self.model_path, self.kept = role, model_path, kept
        self._model: FrozenRoleWorker | None = None
        """None until it has joined."""
        self._staged = ExitStack()
        """Outputs of the last call, for as long as the trainer may read them."""

    @property
    def model(self) -> "FrozenRoleWorker":
        assert self._model is not None
        return self._model

    @endpoint
    def join(self, config: Config, rank: int, world_size: int, rendezvous: str, device: int | None = None) -> None:
        """Meet the other ranks in a new process group, and build this rank's part of the model. Also when a setting has
        changed. ``device``: this rank's GPU."""
        from titan_rl.models.device import take_device
        from titan_rl.trainer.distributed.process_group import join_group
        from titan_rl.trainer.memory.cpu_allocator import release
        from titan_rl.trainer.roles.frozen_worker import FrozenRoleWorker
        from titan_rl.trainer.titan_config import role_titan

        take_device(device)
        self.config, titan = config, role_titan(config, self.role)
        if self._model is not None:
            self._model = None  # the next one needs its memory
            release()
        join_group(rank, world_size, rendezvous, titan.comm.init_timeout_seconds)
        self._model = FrozenRoleWorker(self.config, titan, self.role, self.model_path, self.kept)

    @endpoint
    def compute_outputs(self, batches: list[RowsHandle]) -> list[RowsHandle] | None:
        """Outputs of this role for staged rows; ``batches[group]`` holds a data-parallel group's rows of every update.

        One handle a group; None from ranks without outputs.
        """
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        seconds = self.config.mesh.step_timeout
        with leave_group_on_error():
            outputs = self.model.find([pull_rows(handle, seconds) for handle in batches])
        self._staged.close()
        if outputs is None:
            return None
        return self._staged.enter_context(StagedRows.by(outputs, self.config.mesh.transport))

    @endpoint
    def load_role(self, path: str) -> None:
        """Load other weights."""
        self.model.load(path)

    @endpoint
    def digests(self) -> dict[str, str]:
        """Checksums of this rank's weights, by model."""
        return self.model.digests()
