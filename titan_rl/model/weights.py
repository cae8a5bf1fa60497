"""Weights between Hugging Face directories and sharded TorchTitan parameters, bit for bit both ways."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.model_spec import ModelSpec

_NOT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")


def hf_names(spec: ModelSpec, titan_names: list[str]) -> dict[str, str]:
    """Hugging Face name to TorchTitan name, by TorchTitan's own adapter; tied copies are left out."""
    adapter = spec.state_dict_adapter(spec.model, None)
    return adapter.to_hf({name: name for name in titan_names})


def named_hf_parameters(spec: ModelSpec, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters under their Hugging Face names, sharded as they are."""
    state = model.state_dict()
    return {hf: state[titan] for hf, titan in hf_names(spec, list(state)).items()}


def tensor_files(path: str | Path) -> dict[str, Path]:
    """Tensor name to the file that holds it. Errors: ValueError if the directory holds no safetensors."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {path}: give a Hugging Face model directory")
    names = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file)
    return names


@torch.no_grad()
def load_hf(spec: ModelSpec, model: torch.nn.Module, path: str | Path) -> dict[str, torch.dtype]:
    """Copy a directory's tensors into the model's (sharded) parameters; gives back the file's dtypes by name.

    Every rank reads what it needs from the file. Errors: ValueError if a tensor is missing or its shape differs.
    """
    parameters, files = named_hf_parameters(spec, model), tensor_files(path)
    if missing := sorted(set(parameters) - set(files)):
        raise ValueError(f"{path} lacks {len(missing)} tensors that config.json asks for, first {missing[0]}")
    dtypes = {}
    for name, parameter in parameters.items():
        with safe_open(files[name], "pt") as tensors:
            value = tensors.get_tensor(name)
        if value.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(value.shape)} in {path}, config.json says {tuple(parameter.shape)}")
        dtypes[name] = value.dtype
        if isinstance(parameter, DTensor):
            value = value.to(parameter.dtype).to(parameter.device_mesh.device_type)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(value.to_local())
        else:
            parameter.copy_(value)
    return dtypes


def full_tensors(parameters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors one at a time; all ranks must iterate."""
    for name, parameter in parameters.items():
        yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach())


@torch.no_grad()
def save_hf(spec: ModelSpec, model: torch.nn.Module, source: Path, out: Path, dtypes: dict[str, torch.dtype]) -> None:
    """Write an HF directory: tensors in ``dtypes``, the rest as in ``source``. All ranks call; rank 0 writes."""
    writes = not dist.is_initialized() or dist.get_rank() == 0
    tensors = {}
    for name, tensor in full_tensors(named_hf_parameters(spec, model)):
        if writes:
            # a gathered tensor may be a view of padded memory, which safetensors refuses
            tensors[name] = tensor.to(dtypes[name]).cpu().clone(memory_format=torch.contiguous_format)
    if writes:
        out.mkdir(parents=True, exist_ok=True)
        for pattern in _NOT_WEIGHTS:
            for file in source.glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):
                    shutil.copyfile(file, out / file.name)
        save_torch_state_dict(tensors, out, metadata={"format": "pt"})
