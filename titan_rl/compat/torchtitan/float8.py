"""TorchTitan's linear layer in FP8, which torchao computes."""

from dataclasses import replace
from typing import Any

from torchao.float8 import Float8LinearConfig
from torchtitan.components.quantization.float8 import Float8Linear
from torchtitan.models.common import Linear

from titan_rl.compat.reach import TORCHTITAN, Reach

REACHES = (
    Reach(
        "torchtitan.components.quantization.float8:Float8Linear.Config._torchao_config",
        "train in FP8 by an engine's scales",
    ),
)
TORCHTITAN.require(REACHES)


def float8_linear(linear: Linear.Config, recipe: str, *, emulate: bool) -> Linear.Config:
    """Config of a layer in FP8 in the place of another.

    ``recipe``: torchao's name; scales are not rounded to powers of two, and products over tokens are padded to the
    multiple of 16 that GPUs need. ``emulate``: products of fp32."""
    settings = Float8LinearConfig.from_recipe_name(recipe)
    settings = replace(settings, emulate=emulate, round_scales_to_power_of_2=False, pad_inner_dim=True)
    sizes: dict[str, Any] = dict(in_features=linear.in_features, out_features=linear.out_features, bias=linear.bias)
    return Float8Linear.Config(**sizes, param_init=linear.param_init, _torchao_config=settings)
