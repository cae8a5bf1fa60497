"""Which box of which Hugging Face tensor a rank holds, for every layout: FSDP2, HSDP, TP, PP, EP.

Files, the weight channel and tests see a sharded model only through these boxes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.compat.torch.sharding import StridedShard

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder


@dataclass(frozen=True)
class LowRank:
    """Adapter's product on a box of a weight: ``scale * b @ a`` (arXiv 2106.09685, section 4.1)."""

    b: torch.Tensor
    """[the box's rows, rank]"""
    a: torch.Tensor
    """[rank, the box's columns]"""
    scale: float
    dtype: torch.dtype
    """In which the model computes with both."""

    def of(self, part: tuple[slice, slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, for a part of the box, with the values that the model computes with."""
        rows, columns = part
        b, a = self.b[rows], self.a[:, columns]
        return b.to(self.dtype).to(b.dtype), a.to(self.dtype).to(a.dtype)


@dataclass(frozen=True)
class Shard:
    """Box of one Hugging Face tensor on this rank."""

    name: str
    """As in the checkpoint files, e.g. ``model.layers.0.mlp.experts.3.gate_proj.weight``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """The box's corner in it."""
    tensor: torch.Tensor
    """This rank's values: a view of the parameter's own memory, so an optimizer step changes it."""
    low_rank: LowRank | None = None
    """What the model adds to them where it computes with them."""
    computed_in: torch.dtype | None = None
    """Dtype of the model's products with it, for an adapter's matrix, which readers get in it; None: a weight."""

    def merged(self, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Weights with the adapter merged, of a part of the box (None: all of it)."""
        part = part or tuple(slice(0, n) for n in self.tensor.shape)
        if (added := self.low_rank) is None:
            return self.tensor[part]
        rows, columns = part
        return torch.addmm(self.tensor[part], *added.of((rows, columns)), alpha=added.scale)


_ADAPTER = re.compile(r"\.lora_([ab])\.weight$")
"""TorchTitan's names of an adapter's two matrices end so."""


def is_adapter(titan_name: str) -> bool:
    return _ADAPTER.search(titan_name) is not None


class _NamedParameters(Protocol):
    """What is used of TorchTitan's adapters of state dicts."""

    from_hf_map: Mapping[str, str | None]
    """Hugging Face's name to TorchTitan's; None: the model does without."""


def decoder_of(spec: ModelSpec) -> "Decoder.Config":
    """TorchTitan's config of a model, which is a decoder's for every family (families.py)."""
    return cast("Decoder.Config", spec.model)  # nothing is asked: the class's import takes a second


def hf_names(spec: ModelSpec, titan_names: Iterable[str]) -> dict[str, str]:
    """TorchTitan name to Hugging Face name, with ``{}`` where TorchTitan stacks experts; a tied copy is left out.

    Adapters have PEFT's names, such as ``model.layers.0.self_attn.q_proj.lora_A.weight``.
    """
    assert spec.state_dict_adapter is not None
    adapter = cast(_NamedParameters, spec.state_dict_adapter(spec.model, None))
    templates = {titan: hf for hf, titan in adapter.from_hf_map.items() if titan is not None}
    names = {}
    for name in titan_names:
        if name == "lm_head.weight" and decoder_of(spec).enable_weight_tying:
            continue
        base, layer = _ADAPTER.sub(".weight", name), re.search(r"\d+", name)
        template = templates[re.sub(r"\d+", "{}", base, count=1)]
        if (adapter_part := _ADAPTER.search(name)) is not None:
            template = template.removesuffix("weight") + f"lora_{adapter_part[1].upper()}.weight"
        names[name] = template.replace("{}", layer[0], 1) if layer else template
    return names


def local_box(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Corner and size of this rank's part of a sharded tensor.

    Plain shards split from left to right. FSDP then splits a dimension that TP or EP have split before, which DTensor
    calls strided. Every split is that of ``torch.chunk``, so the last parts may be smaller or empty.
    """
    start, size = [0] * parameter.ndim, list(parameter.shape)
    coordinate, mesh = parameter.device_mesh.get_coordinate(), parameter.device_mesh
    assert coordinate is not None, "a tensor of other ranks"
    shards = [(p, axis) for axis, p in enumerate(parameter.placements) if isinstance(p, ShardPlacement | StridedShard)]
    for placement, axis in sorted(shards, key=lambda shard: isinstance(shard[0], StridedShard)):
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


def local_shards(spec: ModelSpec, model_parts: list[torch.nn.Module], *, adapters: bool = False) -> list[Shard]:
    """Boxes of this rank: tied tensors once, empty parts left out, replicas on each rank.

    ``adapters``: those of adapters, instead of those of the model's own weights.
    """
    shards = []
    for part in model_parts:
        state = part.state_dict()
        for name, template in hf_names(spec, filter(lambda name: is_adapter(name) == adapters, state)).items():
            shards += _boxes(template, state[name].detach())
    return shards


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model's directory, by Hugging Face name, without tied copies.

    Nothing is read, and no memory is needed.
    """
    with torch.device("meta"):
        return {shard.name: shard.shape for shard in local_shards(spec, [spec.model.build()])}
