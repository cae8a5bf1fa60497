"""Layers with low-rank adapters, as TorchTitan's converter makes them."""

from collections.abc import Callable
from typing import Protocol

from torchtitan.protocols.module import Module

from titan_rl.compat.reach import TORCHTITAN, Reach

REACHES = (
    Reach("torchtitan.components.lora:_get_lora_cls._lora_scaling", "switch adapters off and on"),
    Reach("torchtitan.components.lora:_get_lora_cls.lora_a", "find adapted layers"),
    Reach("torchtitan.components.lora:_get_lora_cls.lora_b", "find adapted layers"),
    Reach("torchtitan.protocols.module:Module._param_init", "have no values drawn for adapters"),
)
TORCHTITAN.require(REACHES)


class AdaptedLayer(Protocol):
    """A layer with an adapter: TorchTitan makes its class when the model is converted."""

    lora_a: Module
    lora_b: Module
    _lora_scaling: float


def adapter_scaling(layer: AdaptedLayer) -> float:
    """The factor of an adapter's product (alpha / rank, unless it was set)."""
    return layer._lora_scaling


def set_adapter_scaling(layer: AdaptedLayer, scaling: float) -> None:
    """Have a layer compute with this factor; 0 switches its adapter off."""
    layer._lora_scaling = scaling


def set_initialization(module: Module, by_name: dict[str, Callable]) -> None:
    """How TorchTitan draws a module's own parameters at the start."""
    module._param_init = by_name
