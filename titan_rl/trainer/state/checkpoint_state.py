"""Complete state of a rank through torch.distributed.checkpoint, written in the background.

The state is each rank's shard of weights and optimizer, the schedule, and every rank's random state. Of a model with
adapters it holds these and no weight that is not trained: those are in the directory that the run started from,
identified by its digest.
"""

import json
import random
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from titan_rl.compat.torch.checkpoint import FsspecWriter
from titan_rl.models.weights.shards import is_adapter
from titan_rl.trainer.model.optimizer import load_optimizer
from titan_rl.trainer.state.plain_state import StateError, load_state, read_metadata, reason_of

if TYPE_CHECKING:  # they bring TorchTitan along
    from titan_rl.trainer.rank_interface import LearningModel, TrainerRank

_BASE = "base_model"


def random_state() -> dict[str, torch.Tensor]:
    python = torch.frombuffer(bytearray(json.dumps(random.getstate()).encode()), dtype=torch.uint8)
    state = np.random.get_state()
    assert isinstance(state, tuple)  # as it is unless another form is asked for
    _, keys, *position_and_gauss = state
    return {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([float(value) for value in position_and_gauss], dtype=torch.float64),
        "python": python,
    }


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy_rest"].tolist()
    np.random.set_state(
        ("MT19937", state["numpy_keys"].numpy().astype(np.uint32), int(position), int(has_gauss), cached)
    )
    version, internal, gauss = json.loads(bytes(state["python"].numpy()).decode())
    random.setstate((version, tuple(internal), gauss))


def policy_state(policy: "LearningModel", base: str | None) -> dict[str, Any]:
    """State of the policy and its optimizer.

    ``base``: digest of the weights that its adapters are trained on; None: the whole model is trained."""
    return _model_state(policy, adapters_alone=base is not None) | ({} if base is None else {_BASE: base})


def role_state(name: str, role: "LearningModel") -> dict[str, Any]:
    """State of a learned role, under its name."""
    return {name: _model_state(role)}


def random_states() -> dict[str, Any]:
    """Random states of this rank."""
    return {f"random_rank{dist.get_rank()}": random_state()}


def _model_state(learning: "LearningModel", *, adapters_alone: bool = False) -> dict[str, Any]:
    """Of a model that learns; ``adapters_alone``: without the weights that never change."""
    return {
        "model": {
            name: tensor
            for part in learning.model_parts
            for name, tensor in part.state_dict().items()
            if is_adapter(name) or not adapters_alone
        },
        "optimizer": learning.optimizer.state_dict(),
        "scheduler": learning.scheduler.state_dict(),
    }


class _NoStager(AsyncStager):
    """Writes the state itself."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class BackgroundSave:
    """Background save of a rank's state: a thread writes a copy, one save at a time."""

    def __init__(self, learner: "TrainerRank"):
        self.learner = learner
        # a group of its own, apart from training's collectives; its timeout ends the wait for a dead rank
        timeout = timedelta(seconds=learner.titan.comm.init_timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # of all ranks, this one too
        self._group = group
        self._writing: Future | None = None
        self._is_copied = True
        """Whether the state may change while it is written."""

    def begin(self, folder: Path, shards: str = "", *, copies: bool = True) -> None:
        """Begin a save; all ranks call it. The present state goes into ``folder``, which gets its final name later, or
        into ``shards``, a place in a store (data/storage/shards.py).

        ``copies``: whether a copy is written, which is as large as the state; else ``wait_until_copied`` waits for the
        end. Errors: RuntimeError if the save before is still being written.
        """
        if self._writing is not None and not self._writing.done():
            raise RuntimeError("a checkpoint was begun while the one before is still being written")
        writing = async_save(
            self.learner.state(),
            storage_writer=self._writer(folder, shards),
            process_group=self._group,
            async_stager=None if copies else _NoStager(),
        )
        assert isinstance(writing, Future)  # as it is unless staging is asynchronous, too
        self._writing, self._is_copied = writing, copies

    def wait_until_copied(self) -> None:
        """Wait until the state may change."""
        if self._writing is not None and not self._is_copied:
            wait([self._writing])

    def _writer(self, folder: Path, shards: str) -> FileSystemWriter:
        part = self.learner.part
        if not shards:
            return FileSystemWriter(folder / part, sync_files=False)  # commit does
        return FsspecWriter(f"{shards}/{part}".rstrip("/"), sync_files=True)

    def outcome(self) -> str | None:
        """Outcome of the save: None while it is written, "" on success, else the error."""
        if self._writing is None:
            return "the rank that began it was replaced, or its process group rebuilt"
        if not self._writing.done():
            return None
        error = self._writing.exception()
        return "" if error is None else reason_of(error)

    def wait(self) -> None:
        """Wait for the end of the save. Errors: RuntimeError if it failed."""
        if self._writing is not None:
            wait([self._writing])
        if failure := self.outcome():
            raise RuntimeError(failure)


def load_policy(policy: "LearningModel", base: str | None, checkpoint: Path) -> None:
    """Load the policy from a checkpoint; all ranks call it. ``base``: as in ``policy_state``. Errors: StateError."""
    state = policy_state(policy, base)
    load_state(state, checkpoint)
    if state.get(_BASE) != base:
        raise StateError(
            f"the adapters in {checkpoint} are of other base weights than model.path has: set it to the model that "
            f"they were trained on"
        )
    load_optimizer(policy.optimizer, policy.scheduler, state)


def load_role(name: str, role: "LearningModel", checkpoint: Path) -> bool:
    """Load a learned role, whatever its placement was; returns whether the checkpoint has it.

    All ranks call it. Errors: StateError."""
    if not holds_role(checkpoint, name):
        return False
    folder, state = role_folder(checkpoint, name), role_state(name, role)
    load_state(state, folder)
    load_optimizer(role.optimizer, role.scheduler, state[name])
    return True


def holds_role(checkpoint: Path, name: str) -> bool:
    """Whether a checkpoint has a learned role; without it the run had none until then. Errors: StateError."""
    keys = read_metadata(role_folder(checkpoint, name)).state_dict_metadata
    return any(key.startswith(f"{name}.") for key in keys)


def role_folder(checkpoint: Path, name: str) -> Path:
    """Folder of a learned role in a checkpoint: its own if it had its own processes."""
    return role_only if (role_only := checkpoint / name).is_dir() else checkpoint


def load_random(folder: Path) -> None:
    """Load this rank's random state, unless fewer ranks wrote the checkpoint.

    All ranks call it. Errors: StateError."""
    state, mine = random_states(), f"random_rank{dist.get_rank()}"
    # the length of Python's state, as text, varies, so it is read from the checkpoint
    if (saved := read_metadata(folder).state_dict_metadata.get(f"{mine}.python")) is None:
        state = {}
    else:
        assert not isinstance(saved, BytesStorageMetadata), f"{mine}.python is no tensor"
        state[mine]["python"] = torch.empty(saved.size, dtype=torch.uint8)
    load_state(state, folder)  # which is a call of all ranks
    if state:
        set_random_state(state[mine])
