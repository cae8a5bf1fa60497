"""Training in FP8: linear layers of a model's blocks multiply in E4M3, by TorchTitan's layer and torchao.

    scale = 448 / largest magnitude of a group,   codes = E4M3(value * scale),   value' = codes / scale

In the forward a group is a token's features, or the inputs of a weight's output: what engines with
``generator.quantization = "fp8_per_channel"`` multiply, too. No scale depends on another token, so no log-probability
depends on how rows are packed. torchao's recipes round scales down to powers of two, which engines do not; here they
are not rounded. Weights, their gradients and moments keep their dtypes.

Source: FP8 formats, arXiv 2209.05433; recipes, torchao.float8 (``Float8LinearRecipeName``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder

from titan_rl.compat.torch.compiling import emulate_precision_casts
from titan_rl.models.layers.cpu_products import LeanLinear

Recipe = Literal["none", "rowwise", "rowwise_with_gw_hp"]
"""TorchTitan's names. ``gw_hp``: gradients of weights in high precision, of inputs by one scale for a whole weight."""
_MULTIPLE = 16
"""Of a layer's inputs and outputs, which FP8 products need on GPUs."""
_CAPABILITY = (8, 9)
"""Of NVIDIA's GPUs, from which on they have FP8 products."""


@dataclass(kw_only=True, slots=True)
class Float8Config:
    recipe_name: Recipe = "none"
    filter_fqns: list[str] = field(default_factory=list)
    """Parts of names of layers that stay as they are, by TorchTitan's names, such as ``layers.0.`` or ``.w2``."""

    @property
    def is_on(self) -> bool:
        return self.recipe_name != "none"


def is_installed() -> bool:
    """Whether torchao is there."""
    return find_spec("torchao") is not None


def why_not_on_gpu() -> str:
    """Why this process's GPU has no FP8 products, to follow the setting; empty if it has."""
    found = torch.cuda.get_device_capability()
    if found >= _CAPABILITY:
        return ""
    return f"needs a GPU of compute capability 8.9 or later, this one has {found}"


def linear_names(config: Decoder.Config) -> list[str]:
    """TorchTitan's names of a model's linear layers that could be in FP8."""
    return [name for name, *_ in _linears(config)]


def float8_names(config: Decoder.Config, settings: Float8Config) -> list[str]:
    """TorchTitan's names of the linear layers that are to be in FP8."""
    return [name for name, linear, _, _ in _linears(config) if _is_chosen(name, linear, settings)]


def convert_to_float8(config: Decoder.Config, settings: Float8Config, *, emulate: bool, compiles: bool) -> None:
    """Have the layers of ``float8_names`` built in FP8. ``emulate``: without FP8 products, in fp32.

    Errors: ValueError for a GPU that has no such products."""
    if not settings.is_on:
        return
    if not emulate and (why := why_not_on_gpu()):
        raise ValueError(f"float8.recipe_name = {settings.recipe_name!r} {why}")
    from titan_rl.compat.torchtitan.float8 import float8_linear  # which imports torchao

    if compiles:
        emulate_precision_casts()  # as TorchTitan's converter does
    for name, linear, parent, attribute in list(_linears(config)):
        if _is_chosen(name, linear, settings):
            setattr(parent, attribute, float8_linear(linear, settings.recipe_name, emulate=emulate))


def _is_chosen(name: str, linear: Linear.Config, settings: Float8Config) -> bool:
    fits = linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0
    return fits and not any(part in name for part in settings.filter_fqns)


def _linears(config: Decoder.Config) -> Iterator[tuple[str, Linear.Config, Any, str]]:
    """Name, config, parent and attribute of each linear layer of the blocks; routers have a class of their own."""
    for number, block in enumerate(config.layers):
        for name, linear, parent, attribute in block.traverse(Linear.Config):
            if type(linear) in (Linear.Config, LeanLinear.Config):
                yield f"layers.{number}.{name}", linear, parent, str(attribute)
