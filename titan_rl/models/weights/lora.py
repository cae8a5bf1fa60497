"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1).

A weight W stays as it is, and the model computes with W + (alpha / rank) B A, of which A [rank, inputs] and B [outputs,
rank] alone are trained.

TorchTitan's converter makes the adapted layers and freezes all else; here are the names, and the checks that it leaves
out. Targets have Hugging Face's names, as PEFT's ``target_modules`` have. Without adapters stay experts, which are no
linear layers, routers, embeddings, the output head, and vision towers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.compat.torchtitan.adapters import (
    AdaptedLayer,
    adapter_scaling,
    set_adapter_scaling,
    set_initialization,
)
from titan_rl.config.load import nearest
from titan_rl.config.sections.schema import LoraConfig
from titan_rl.models.layers.layer_configs import FROM_FILE
from titan_rl.models.weights.shards import decoder_of, hf_names

_MADE_FROM = {"wk": "wkv", "wv": "wkv"}
"""TorchTitan's layers whose config has another name, since two are made from one."""


def linear_layers(spec: ModelSpec) -> dict[str, str]:
    """Projections that support adapters: Hugging Face's name (``q_proj``) to TorchTitan's (``wq``)."""
    with torch.device("meta"):
        modules = spec.model.build().named_modules()
    weights = [f"{name}.weight" for name, module in modules if isinstance(module, Linear) and _is_projection(name)]
    return {hf.split(".")[-2]: titan.split(".")[-2] for titan, hf in hf_names(spec, weights).items()}


_WHOLE = ("wq_a", "wkv_a")
"""Projections to latents, of which tensor-parallel ranks have the whole, and TorchTitan's adapters know only parts."""


def _is_projection(name: str) -> bool:
    return name.startswith("layers.") and not name.endswith((*_WHOLE, ".gate"))


def targets_of(spec: ModelSpec, lora: LoraConfig) -> list[str]:
    """Projections that get adapters, by Hugging Face's names. Errors: ValueError for unsupported targets."""
    linears = linear_layers(spec)
    for name in lora.targets:
        if name not in linears:
            raise ValueError(f"lora.targets: the model has no {name!r}{_why_none(spec)}; {nearest(name, linears)}")
    requested = list(dict.fromkeys(lora.targets)) or list(linears)
    made_from = {_config_name(linears[name]) for name in requested}
    for name, titan in linears.items():
        if name not in requested and _config_name(titan) in made_from:
            raise ValueError(f"lora.targets: TorchTitan adapts k_proj and v_proj together: add {name!r}, or leave both")
    return requested


def _config_name(titan: str) -> str:
    return _MADE_FROM.get(titan, titan)


def _why_none(spec: ModelSpec) -> str:
    has_experts = any(getattr(layer, "moe", None) is not None for layer in decoder_of(spec).layers)
    return " outside of its experts and latents, which TorchTitan cannot adapt" if has_experts else ""


def with_adapters(spec: ModelSpec, lora: LoraConfig) -> ModelSpec:
    """Spec with trainable adapters on frozen weights; ``spec`` itself if ``lora`` is off.

    Errors: ValueError for targets that the model has not.
    """
    if not lora.rank:
        return spec
    linears = linear_layers(spec)
    fields = sorted({_config_name(linears[name]) for name in targets_of(spec, lora)})
    converter = LoRAConverter(LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=fields))
    model = converter.convert(spec.model)
    if (tower := getattr(model, "visual", None)) is not None:
        tower.is_trained = False  # it is transformers', whose parameters TorchTitan's converter does not reach
    return replace(spec, model=model)


def adapted_modules(model_parts: Sequence[nn.Module]) -> Iterator[AdaptedLayer]:
    """Layers with an adapter."""
    for part in model_parts:
        yield from (cast(AdaptedLayer, module) for module in part.modules() if hasattr(module, "lora_a"))


def skip_adapter_init(model: nn.Module) -> None:
    """Disable TorchTitan's adapter initialization, which depends on the layout."""
    for module in adapted_modules([model]):
        set_initialization(module.lora_a, FROM_FILE)
        set_initialization(module.lora_b, FROM_FILE)


@contextmanager
def adapter_disabled(model_parts: Sequence[nn.Module]) -> Iterator[None]:
    """Disable adapters inside the context, which gives the base model."""
    scalings = [(module, adapter_scaling(module)) for module in adapted_modules(model_parts)]
    try:
        for module, _ in scalings:
            set_adapter_scaling(module, 0.0)  # x + 0 y is x, to the bit, for whatever y is finite
        yield
    finally:
        for module, scaling in scalings:
            set_adapter_scaling(module, scaling)
