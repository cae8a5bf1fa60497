"""Checkpoints through torch.distributed.checkpoint: whole or absent.

A checkpoint is written beside its place and renamed into it when its last byte is on disk. It holds each rank's
shard of weights and optimizer, the schedule, every rank's random state, and (state.json) what the controller knows.
"""

import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

_STATE = "state.json"


@dataclass(frozen=True)
class ControllerState:
    """What the controller must know to go on."""

    step: int
    """Steps done, which is also the policy version and the ledger's mark."""
    stream_position: int
    held_out_before: dict | None
    """The evaluation before the first step, which a resumed run cannot make again."""
    seconds_training: float


def random_state() -> dict[str, torch.Tensor]:
    python = torch.frombuffer(bytearray(json.dumps(random.getstate()).encode()), dtype=torch.uint8)
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([float(value) for value in rest], dtype=torch.float64),
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


def _learner_state(learner) -> dict:
    return {
        "model": {name: tensor for part in learner.model_parts for name, tensor in part.state_dict().items()},
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": learner.scheduler.state_dict(),
        f"random_rank{dist.get_rank()}": random_state(),
    }


def save_learner(learner, folder: Path) -> None:
    """All ranks together, into a folder that is not the checkpoint's own yet."""
    dcp.save(_learner_state(learner), checkpoint_id=folder)


def load_learner(learner, folder: Path) -> None:
    """All ranks together. Errors: whatever DCP raises for a folder that is not whole."""
    state = _learner_state(learner)
    # the length of Python's state, as text, varies: ask the checkpoint
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    mine = f"random_rank{dist.get_rank()}"
    if saved := metadata.get(f"{mine}.python"):
        state[mine]["python"] = torch.empty(saved.size, dtype=torch.uint8)
    else:  # there were fewer ranks then
        del state[mine]
    learner.before_update()
    dcp.load(state, checkpoint_id=folder)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scheduler.load_state_dict(state["scheduler"])
    if mine in state:
        set_random_state(state[mine])


class CheckpointFolder:
    """The checkpoints of a run, newest last."""

    def __init__(self, root: Path, keep_latest_k: int):
        self.root, self.keep_latest_k = root, keep_latest_k

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.root.glob("step-*") if path.is_dir())

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write into; what an interrupted save left behind is removed."""
        for leftover in self.root.glob("writing-*"):
            shutil.rmtree(leftover)
        folder = self.root / f"writing-{step:06d}"
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, state: ControllerState) -> Path:
        """The folder becomes the checkpoint of ``state.step``; only then do older ones go."""
        (folder / _STATE).write_text(json.dumps(asdict(state)))
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        place = self.path(state.step)
        aside = self._set_aside(place)
        folder.rename(place)
        _sync(self.root)
        for step in self.steps()[: -self.keep_latest_k]:
            aside += self._set_aside(self.path(step))
        for old in aside:
            shutil.rmtree(old)
        return place

    def _set_aside(self, place: Path) -> list[Path]:
        """Out of the checkpoints' names, so that no half of one is ever found."""
        if not place.exists():
            return []
        return [place.rename(self.root / f"writing-old-{place.name}")]

    def latest(self) -> tuple[Path, ControllerState] | None:
        for step in reversed(self.steps()):
            state = json.loads((self.path(step) / _STATE).read_text())
            return self.path(step), ControllerState(**state)
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
