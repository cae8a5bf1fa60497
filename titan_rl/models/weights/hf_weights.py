"""Weights from Hugging Face directories into a rank's boxes, and back, bit for bit."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.model_directory.directory import belonging_files, stored_tensors, weight_files
from titan_rl.config.model_directory.draft_heads import COUNTS, is_prediction_layer
from titan_rl.config.model_directory.safetensors_files import StoredTensor
from titan_rl.config.model_directory.weight_checks import check_names
from titan_rl.data.storage.files import sampled_checksum, wanting
from titan_rl.models.weights.prediction_layers import numbers_of
from titan_rl.models.weights.quantized_files import Quantizer, is_linear
from titan_rl.models.weights.shards import Shard, decoder_of, expected_shapes

MOST_AS_TRAINED = 2_000_000_000
"""Parameters of the largest model that ``auto`` writes in float32, in which it is trained: 8 GB."""


_ALWAYS_FLOAT32 = ".e_score_correction_bias"
"""End of the name of a router's bias, which transformers and vLLM hold in float32, whatever the weights are in."""


def slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def check_weights(spec: ModelSpec, path: str | Path) -> None:
    """Check that a directory holds exactly the tensors of a model. Errors: ValueError."""
    check_names(model_tensors(spec, path), expected_shapes(spec), is_tied=decoder_of(spec).enable_weight_tying)


def model_tensors(spec: ModelSpec, path: str | Path) -> dict[str, StoredTensor]:
    """Tensors of a directory without what its family ignores, and without layers for multi-token prediction."""
    ignored, further = tuple(getattr(spec.state_dict_adapter, "ignored", ())), numbers_of(spec, path)
    return {
        name: tensor
        for name, tensor in stored_tensors(path).items()
        if not (name.startswith(ignored) or is_prediction_layer(name, further))
    }


def base_digest(path: str | Path) -> str:
    """Digest of config.json and samples of the weights, independent of the path."""
    files = [Path(path) / "config.json", *weight_files(path)]
    return xxhash.xxh3_128_hexdigest(" ".join(map(sampled_checksum, files)).encode())


@torch.no_grad()
def load_hf(shards: list[Shard], path: str | Path) -> dict[str, torch.dtype]:
    """Fill a rank's boxes from a directory, reading only those parts; returns the files' dtypes by name.

    Errors: ValueError if a tensor is missing, its shape differs, or it holds NaN or infinities.
    """
    stored, by_file = stored_tensors(path), {}
    if missing := sorted({shard.name for shard in shards} - set(stored)):
        raise ValueError(f"{path} lacks {len(missing)} tensors that config.json asks for, first {missing[0]}")
    for shard in shards:
        if (shape := stored[shard.name].shape) != shard.shape:
            raise ValueError(f"{shard.name} is {shape} in {path}, config.json says {shard.shape}")
        by_file.setdefault(stored[shard.name].file, []).append(shard)
    dtypes = {}
    for file, file_shards in by_file.items():
        with safe_open(file, "pt") as tensors:
            for shard in file_shards:
                values = tensors.get_slice(shard.name)[slices(shard.start, shard.tensor.shape)]
                if not values.isfinite().all():
                    raise ValueError(f"{shard.name} in {file} holds NaN or infinities: copy the file again")
                shard.tensor.copy_(values)
                dtypes[shard.name] = values.dtype
    return dtypes


def gather_whole(
    shards: list[Shard], dtypes: dict[str, torch.dtype], device: torch.device
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Tensors by name, adapters merged, assembled on rank 0's CPU; None on other ranks.

    All ranks must iterate.

    ``device``: the one that the process group sends tensors from.
    """
    mine = {(shard.name, shard.start): shard for shard in shards}
    described = [(s.name, s.start, tuple(s.tensor.shape), s.shape, dtypes[s.name]) for s in shards]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, described)
    owners: dict[str, dict[tuple, tuple]] = {}
    for rank, rank_boxes in enumerate(everyone):
        for name, start, size, shape, dtype in rank_boxes:
            owners.setdefault(name, {}).setdefault(start, (rank, size, shape, dtype))
    for name in sorted(owners):
        whole = None
        for start, (owner, size, shape, dtype) in sorted(owners[name].items()):
            box = None
            if owner == dist.get_rank():
                box = mine[name, start].merged().detach().to(device, dtype).contiguous()
                if owner:
                    dist.send(box, dst=0)
            elif not dist.get_rank():
                box = torch.empty(size, dtype=dtype, device=device)
                dist.recv(box, src=owner)
            if not dist.get_rank():
                if whole is None:
                    whole = torch.empty(shape, dtype=dtype)
                assert box is not None, "rank 0 has every box, its own or another's"
                whole[slices(start, size)] = box.cpu()
        yield name, whole


def export_dtypes(spec: ModelSpec, base: dict[str, torch.dtype], setting: str) -> dict[str, torch.dtype]:
    """Export dtype of each tensor. ``base``: as read; ``setting``: ``checkpoint.export_dtype``."""
    if setting == "auto":
        if sum(map(math.prod, expected_shapes(spec).values())) > MOST_AS_TRAINED:
            return base
        setting = "float32"
    chosen = getattr(torch, setting)
    return {name: torch.float32 if name.endswith(_ALWAYS_FLOAT32) else chosen for name in base}


def save_hf(
    shards: list[Shard],
    source: Path,
    out: Path,
    dtypes: dict[str, torch.dtype],
    device: torch.device,
    quantizer: Quantizer | None = None,
    tables: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write an HF directory: tensors in ``dtypes``, which config.json says, too, the rest as in ``source``. All ranks
    call; rank 0 writes. ``quantizer``: of linear layers; None leaves them as they are.
    ``tables``: tensors that are written as they are. Errors: ValueError for a weight
    that float16 cannot hold, or FP8 has no scale for; DiskFull."""
    if quantizer is not None:
        dtypes = {name: quantizer.dtype if is_linear(name) else dtype for name, dtype in dtypes.items()}
    tensors = {name: whole for name, whole in gather_whole(shards, dtypes, device) if whole is not None}
    if dist.get_rank():
        return
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float16 and not tensor.isfinite().all():
            raise ValueError(f"{name} is beyond what float16 holds: set checkpoint.export_dtype = 'bfloat16'")
    weights = {tensor.dtype for name, tensor in tensors.items() if not name.endswith(_ALWAYS_FLOAT32)}
    if quantizer is not None:
        weights = {tensor.dtype for name, tensor in tensors.items() if not is_linear(name)}  # as engines compute, too
        quantizer.quantize(tensors, device)
    tensors |= dict(tables or {})
    with wanting(out, sum(tensor.nbytes for tensor in tensors.values())):
        out.mkdir(parents=True, exist_ok=True)
        for name in belonging_files(source):
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, out / name)
        _write_dtype(out / "config.json", weights)
        if quantizer is not None:
            config = read_json(out / "config.json") | {"quantization_config": quantizer.config}
            config |= {key: 0 for key in COUNTS if key in config}  # those layers are not written in FP8
            (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_torch_state_dict(tensors, out, metadata={"format": "pt"})


def _write_dtype(path: Path, dtypes: set[torch.dtype]) -> None:
    """In config.json, under the names that it has for it; one of several dtypes stays as it was."""
    if len(dtypes) > 1:
        return
    [dtype] = dtypes
    config = read_json(path)
    for table in (config, config.get("text_config", {})):
        for key in [key for key in ("dtype", "torch_dtype") if key in table] or (["dtype"] if table is config else []):
            table[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
