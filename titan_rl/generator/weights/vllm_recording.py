"""What a vLLM rank needs of a checkpoint, recorded from vLLM's own loader.

The model's ``load_weights`` runs once with stand-ins: meta tensors, which have no memory, into parameters that are on
meta too. Each ``copy_`` of a loader shows which view of which stand-in goes into which view of which parameter. So name
mapping, fusing, tensor parallelism and expert placement are vLLM's own, for any model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from titan_rl.compat.torch.tensors import TorchDispatchMode, changes_arguments, storage_identity
from titan_rl.compat.vllm.loading import unprocessed_on_meta
from titan_rl.mesh.channel.plan import Box, Interner, Need, PlanError, Units, split_name


@dataclass(frozen=True)
class Target:
    """Strided view of a parameter that stores a needed box, with the box's dimensions."""

    module: str
    parameter: str
    offset: int
    """In elements, as the stride."""
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """Copy made by a loader: checkpoint box, stored dtype and target."""

    name: str
    box: Box
    dtype: str
    target: Target


def needs(recorded: list[Recorded], interner: Interner) -> Units:
    """Needs of a recording, for the plan."""
    return interner.units(
        (unit, Need(name, copy.box, copy.dtype)) for copy in recorded for unit, name in [split_name(copy.name)]
    )


class _CopyRecorder(TorchDispatchMode):
    """Records every ``copy_`` from a stand-in into a parameter."""

    def __init__(self, sources: dict[int, tuple[str, torch.Tensor]], targets: dict[int, tuple[str, str]]):
        super().__init__()
        self.sources, self.targets = sources, targets
        self.zeroed: set[str] = set()
        self.recorded: list[Recorded] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        source = self.sources.get(storage_identity(args[0])) if args and isinstance(args[0], torch.Tensor) else None
        if func is torch.ops.aten.copy_.default and (target := self.targets.get(storage_identity(args[0]))):
            self._note(args[0], args[1], target)
            return args[0]  # vLLM keeps biases off meta, and nothing can be copied there from a stand-in
        if source and func is torch.ops.aten.clone.default:
            return args[0]  # a copy that is only laid out anew is the same values
        if source and changes_arguments(func):
            self._note_change(func, args[0], *source)
        return func(*args, **(kwargs or {}))

    def _note_change(self, func: Any, view: torch.Tensor, name: str, whole: torch.Tensor) -> None:
        if func is not torch.ops.aten.zero_.default or view.numel() != whole.numel():
            raise PlanError(f"{name}: vLLM's loader changes it before it copies it")
        self.zeroed.add(name)  # another tensor-parallel rank adds it

    def _note(self, into: torch.Tensor, view: torch.Tensor, target: tuple[str, str]) -> None:
        source = self.sources.get(storage_identity(view))
        if source is None:
            raise PlanError(f"vLLM computes {'.'.join(target)} from the checkpoint instead of copying it")
        name, whole = source
        if name in self.zeroed:
            return
        if view.shape != into.shape:
            raise PlanError(f"{name}: vLLM's loader broadcasts {tuple(view.shape)} to {tuple(into.shape)}")
        box, places = box_of_view(name, whole, view)
        stride = tuple(0 if place is None else into.stride(place) for place in places)
        dtype = str(into.dtype).removeprefix("torch.")
        self.recorded.append(Recorded(name, box, dtype, Target(*target, int(into.storage_offset()), stride)))


def box_of_view(name: str, whole: torch.Tensor, view: torch.Tensor) -> tuple[Box, list[int | None]]:
    """The box of a contiguous tensor that a view shows, and for each dimension of the tensor that of the view.

    None stands for a dimension that the view does not have, since it shows only one index of it. Errors: PlanError if
    the view is not a box.
    """
    offset, start = view.storage_offset(), []
    for stride in whole.stride():
        start.append(offset // stride)
        offset %= stride
    places: list[int | None] = []
    free = [d for d in range(view.dim()) if view.shape[d] > 1]
    for stride in whole.stride():
        places.append(next((d for d in free if view.stride(d) == stride), None))
        if places[-1] is not None:
            free.remove(places[-1])
    size = [1 if place is None else view.shape[place] for place in places]
    inside = all(s + n <= full for s, n, full in zip(start, size, whole.shape, strict=True))
    if free or not inside:
        raise PlanError(f"{name}: vLLM's loader takes a view of it that is not a box")
    return Box(tuple(start), tuple(size)), places


def record_on_meta(model: torch.nn.Module, checkpoint: Iterable[tuple[str, tuple[int, ...]]]) -> list[Recorded]:
    """Copies made when these tensors (Hugging Face name, shape) are loaded into a model on meta.

    Errors: PlanError if a loader does anything else than copy boxes.
    """
    stand_ins = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in checkpoint}
    sources = {storage_identity(tensor): (name, tensor) for name, tensor in stand_ins.items()}
    targets = {
        storage_identity(parameter): (path, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    with torch.no_grad(), _CopyRecorder(sources, targets) as recorder:
        load_weights = model.load_weights
        assert callable(load_weights), "a model of vLLM's"
        load_weights(iter(stand_ins.items()))
    return recorder.recorded


def record(model: torch.nn.Module, checkpoint: Iterable[tuple[str, tuple[int, ...]]]) -> list[Recorded]:
    """Copies made by the loader of a model in use. To be called only between two engine steps."""
    with unprocessed_on_meta(model):
        return record_on_meta(model, checkpoint)
