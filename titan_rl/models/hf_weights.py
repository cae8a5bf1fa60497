"""Weights from Hugging Face directories into a rank's boxes, and back, bit for bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from titan_rl.models.safetensors_files import tensor_files
from titan_rl.models.shards import Shard

_NOT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")


def _slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


@torch.no_grad()
def load_hf(shards: list[Shard], path: str | Path) -> dict[str, torch.dtype]:
    """Fill a rank's boxes from a directory, reading only those parts; returns the files' dtypes by name.

    Errors: ValueError if a tensor is missing or its shape differs.
    """
    files = tensor_files(path)
    if missing := sorted({shard.name for shard in shards} - set(files)):
        raise ValueError(f"{path} lacks {len(missing)} tensors that config.json asks for, first {missing[0]}")
    dtypes, by_file = {}, {}
    for shard in shards:
        by_file.setdefault(files[shard.name], []).append(shard)
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as tensors:
            for shard in wanted:
                whole = tensors.get_slice(shard.name)
                shape = tuple(whole.get_shape())
                if shape != shard.shape:
                    raise ValueError(f"{shard.name} is {shape} in {path}, config.json says {shard.shape}")
                values = whole[_slices(shard.start, shard.tensor.shape)]
                shard.tensor.copy_(values)
                dtypes[shard.name] = values.dtype
    return dtypes


def gather_whole(
    shards: list[Shard], dtypes: dict[str, torch.dtype], device: torch.device
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each tensor by name, assembled from all ranks' boxes on rank 0's CPU; None on the others. All ranks must iterate.

    ``device``: the one that the process group sends tensors from.
    """
    mine = {(shard.name, shard.start): shard for shard in shards}
    described = [(s.name, s.start, tuple(s.tensor.shape), s.shape, dtypes[s.name]) for s in shards]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, described)
    owners: dict[str, dict[tuple, tuple]] = {}
    for rank, theirs in enumerate(everyone):
        for name, start, size, shape, dtype in theirs:
            owners.setdefault(name, {}).setdefault(start, (rank, size, shape, dtype))
    for name in sorted(owners):
        whole = None
        for start, (owner, size, shape, dtype) in sorted(owners[name].items()):
            box = None
            if owner == dist.get_rank():
                box = mine[name, start].tensor.detach().to(device, dtype).contiguous()
                if owner:
                    dist.send(box, dst=0)
            elif not dist.get_rank():
                box = torch.empty(size, dtype=dtype, device=device)
                dist.recv(box, src=owner)
            if not dist.get_rank():
                if whole is None:
                    whole = torch.empty(shape, dtype=dtype)
                whole[_slices(start, size)] = box.cpu()
        yield name, whole


def save_hf(shards: list[Shard], source: Path, out: Path, dtypes: dict[str, torch.dtype], device: torch.device) -> None:
    """Write an HF directory: tensors in ``dtypes``, the rest as in ``source``. All ranks call; rank 0 writes."""
    tensors = dict(gather_whole(shards, dtypes, device))
    if dist.get_rank():
        return
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _NOT_WEIGHTS:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, out / file.name)
    save_torch_state_dict(tensors, out, metadata={"format": "pt"})
