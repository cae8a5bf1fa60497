"""Which box of which Hugging Face tensor a rank holds, for every layout: FSDP2, HSDP, TP, PP, EP.

Files, the weight channel and tests see a sharded model only through these boxes.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torchtitan.protocols.model_spec import ModelSpec


@dataclass(frozen=True)
class Shard:
    """A box of one Hugging Face tensor that this rank holds."""

    name: str
    """As in the checkpoint files, e.g. ``model.layers.0.mlp.experts.3.gate_proj.weight``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """The box's corner in it."""
    tensor: torch.Tensor
    """This rank's values: a view of the parameter's own memory, so an optimizer step changes it."""


def hf_names(spec: ModelSpec, titan_names: Iterable[str]) -> dict[str, str]:
    """TorchTitan name to Hugging Face name, with ``{}`` where TorchTitan stacks experts; a tied copy is left out."""
    adapter = spec.state_dict_adapter(spec.model, None)
    templates = {titan: hf for hf, titan in adapter.from_hf_map.items() if titan is not None}
    names = {}
    for name in titan_names:
        if name == "lm_head.weight" and spec.model.enable_weight_tying:
            continue
        layer = re.search(r"\d+", name)
        template = templates[re.sub(r"\d+", "{}", name, count=1)]
        names[name] = template.replace("{}", layer[0], 1) if layer else template
    return names


def local_box(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Corner and size of this rank's part of a sharded tensor.

    Plain shards split from left to right. FSDP then splits a dimension that TP or EP have split before, which DTensor
    calls strided. Every split is that of ``torch.chunk``, so the last parts may be smaller or empty.
    """
    start, size = [0] * parameter.ndim, list(parameter.shape)
    coordinate, mesh = parameter.device_mesh.get_coordinate(), parameter.device_mesh
    shards = [(p, axis) for axis, p in enumerate(parameter.placements) if isinstance(p, ShardPlacement | _StridedShard)]
    for placement, axis in sorted(shards, key=lambda shard: isinstance(shard[0], _StridedShard)):
        dim, chunk = placement.dim, math.ceil(size[placement.dim] / mesh.size(axis))
        begin = min(chunk * coordinate[axis], size[dim])
        start[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    return tuple(start), tuple(size)


def _boxes(template: str, parameter: torch.Tensor) -> list[Shard]:
    if isinstance(parameter, DTensor):
        (start, size), local = local_box(parameter), parameter.to_local()
    else:
        start, size, local = (0,) * parameter.ndim, tuple(parameter.shape), parameter
    # an empty part may have lost its other dimensions
    assert local.shape == size or not local.numel(), f"{template}: a part of {tuple(local.shape)} should be {size}"
    if not local.numel():
        return []
    if "{}" not in template:
        return [Shard(template, tuple(parameter.shape), start, local)]
    return [
        Shard(template.format(start[0] + index), tuple(parameter.shape[1:]), start[1:], expert)
        for index, expert in enumerate(local.unbind())
    ]


def local_shards(spec: ModelSpec, model_parts: list[torch.nn.Module]) -> list[Shard]:
    """All boxes of this rank: a tied tensor once, empty parts not at all, a replica on each rank that has one."""
    shards = []
    for part in model_parts:
        state = part.state_dict()
        for name, template in hf_names(spec, state).items():
            shards += _boxes(template, state[name].detach())
    return shards


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a directory of such a model holds, by Hugging Face name; a tied copy is left out.

    Nothing is read, and no memory is needed.
    """
    with torch.device("meta"):
        return {shard.name: shard.shape for shard in local_shards(spec, [spec.model.build()])}
