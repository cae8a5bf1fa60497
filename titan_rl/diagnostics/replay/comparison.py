"""What a run recorded against what came of it again: steps, and at the end weights and moments.

Where both were computed in one order of additions they are the same bits or they differ. Where no such order holds
(trainer/model/determinism.py) nothing is called equal but within a tolerance.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_rl.config.load import ConfigError
from titan_rl.controller.preflight.device import TRAINER_DEVICE
from titan_rl.records.run_directory.events import read_events
from titan_rl.trainer.model.determinism import RankPlatform, is_equal
from titan_rl.trainer.roles.names import LEARNED
from titan_rl.trainer.state.checkpoint_state import role_folder
from titan_rl.trainer.state.plain_state import StateError, load_state, read_metadata

_BATCH_BYTES = 1 << 28
"""Of tensors that are read at once."""


def recorded_places(root: Path) -> list[RankPlatform]:
    """Recorded trainer devices of a run directory. Runs of releases that did not say it had no GPU."""
    events = (event for event in read_events(root) if event.get("kind") == TRAINER_DEVICE)
    return [RankPlatform(str(event.get("device")), event.get("deterministic") is True) for event in events]


def equal_in_words(within: float) -> str:
    return f"equal within {within:g}" if within else "equal"


@dataclass(frozen=True)
class ComparedStep:
    """Recorded and replayed numbers of a step."""

    step: int
    recorded_loss: float
    loss: float
    recorded_grad_norm: float
    grad_norm: float
    tolerance: float = 0.0
    """0: bit for bit."""

    @property
    def equal(self) -> bool:
        """Also where no update was applied, then and now."""
        losses = is_equal(self.loss, self.recorded_loss, self.tolerance, of_order=1.0)
        return losses and is_equal(self.grad_norm, self.recorded_grad_norm, self.tolerance)

    def line(self) -> str:
        return (
            f"step {self.step:>5}  loss {self.recorded_loss: .9e} -> {self.loss: .9e}  "
            f"grad norm {self.recorded_grad_norm:.9e} -> {self.grad_norm:.9e}  "
            f"{equal_in_words(self.tolerance) if self.equal else 'DIFFERENT'}"
        )

    def as_json(self) -> dict:
        """JSON has no NaN."""
        values = {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}
        return values | {"equal": self.equal}


@dataclass(frozen=True)
class ComparedState:
    """Weights and moments at the last step, against the run's own checkpoint of it."""

    checkpoint: str
    num_tensors: int
    num_different: int
    first_different: str = ""
    largest_difference: float = 0.0
    """Within the first that differs."""
    relative_difference: float = 0.0
    """Norm of the difference over the norm: of all weights, or of all moments of one kind, whichever is larger. Of one
    tensor it would say little: a gradient that is zero but for rounding has moments of nothing else."""

    def is_equal(self, within: float) -> bool:
        return not self.num_different or self.relative_difference <= within

    def line(self, within: float) -> str:
        what = f"{self.num_tensors} tensors of weights and moments against {self.checkpoint}"
        if within and self.is_equal(within):
            return f"{what}: {equal_in_words(within)} ({self.relative_difference:.1e})"
        if not self.num_different:
            return f"{what}: equal, bit for bit"
        return (
            f"{what}: {self.num_different} differ, the first {self.first_different} "
            f"(by at most {self.largest_difference:.3e})"
        )


def compared(checkpoint: Path, replayed: Path) -> ComparedState:
    """Comparison of two checkpoints. Errors: ConfigError if the run's own cannot be read."""
    try:
        return compare_states(checkpoint, replayed)
    except StateError as error:
        raise ConfigError(f"weights cannot be compared: {error}") from None


def compare_states(checkpoint: Path, other: Path) -> ComparedState:
    """Weights first, then the optimizer's state, a tensor at a time, whatever ranks wrote them."""
    tensors, others = _tensors(checkpoint), _tensors(other)
    unlike = [name for name in tensors if name not in others or _layout(tensors[name]) != _layout(others[name])]
    different = [(name, math.nan) for name in (*(name for name in others if name not in tensors), *unlike)]
    is_whole, sums = not different, defaultdict(lambda: [0.0, 0.0])
    for name, a, b in _pairs(checkpoint, other, {name: tensors[name] for name in tensors if name not in unlike}):
        difference = a.double() - b.double()
        of_kind = sums[name.rpartition(".")[2] if ".exp_avg" in name else "weights"]
        of_kind[0] += float(difference.square().sum())
        of_kind[1] += float(a.double().square().sum())
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            different.append((name, float(difference.abs().max())))
    first, largest = different[0] if different else ("", 0.0)
    relative = max((_ratio(*pair) for pair in sums.values()), default=0.0) if is_whole else math.inf
    return ComparedState(str(checkpoint), len(tensors), len(different), first, largest, relative)


def _ratio(difference: float, size: float) -> float:
    """Of square roots. NaN is as far off as can be."""
    if not difference >= 0:
        return math.inf
    return 0.0 if difference == 0 else math.sqrt(difference / size) if size else math.inf


def _pairs(
    checkpoint: Path, other: Path, entries: dict[str, TensorStorageMetadata]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for batch in _batches(entries):
        here, there = _read_tensors(checkpoint, batch), _read_tensors(other, batch)
        yield from ((name, here[name], there[name]) for name in batch)


def _batches(entries: dict[str, TensorStorageMetadata]) -> Iterator[dict[str, TensorStorageMetadata]]:
    """Tensors of one folder at a time, as many as ``_BATCH_BYTES`` hold: each read begins with the folder's list."""
    batch, size, first = dict[str, TensorStorageMetadata](), 0, ""
    for name, entry in entries.items():
        num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
        if batch and (size + num_bytes > _BATCH_BYTES or _role_of(name) != _role_of(first)):
            yield batch
            batch, size = {}, 0
        batch[name], size, first = entry, size + num_bytes, name
    if batch:
        yield batch


def _role_of(name: str) -> str:
    return name.partition(".")[0]


def _tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Also those of a role that had processes of its own, which are in a folder of its own."""
    kinds = [(role, f"{role}.{kind}") for role in LEARNED for kind in ("model.", "optimizer.")]
    return {
        name: entry
        for role, kind in (("", "model."), ("", "optimizer."), *kinds)
        for name, entry in read_metadata(role_folder(checkpoint, role)).state_dict_metadata.items()
        if name.startswith(kind) and isinstance(entry, TensorStorageMetadata)
    }


def _layout(entry: TensorStorageMetadata) -> tuple[torch.Size, torch.dtype]:
    return entry.size, entry.properties.dtype


def _read_tensors(checkpoint: Path, entries: dict[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Tensors of one folder, flat."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load_state(state, role_folder(checkpoint, _role_of(next(iter(state)))), no_dist=True)
    return {name: tensor.reshape(-1) for name, tensor in state.items()}
