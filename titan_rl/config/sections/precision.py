"""Whether trainer and engines multiply in FP8, and by the same values."""

from collections.abc import Mapping
from typing import Any, Literal

Fp8Products = Literal["none", "alike", "different"]


def fp8_products(settings: Mapping[str, Any]) -> Fp8Products:
    """How trainer and engines of a run multiply.

    They do alike if both round a token's features, and the inputs of each output of a layer, by one scale; ranks of an
    engine have scales of their own. ``settings``: by dotted keys, of which those with defaults may be left out."""
    quantization, recipe = settings.get("generator.quantization", "none"), settings.get("float8.recipe_name", "none")
    if quantization == recipe == "none":
        return "none"
    has_all = not settings.get("float8.filter_fqns") and settings.get("generator.tensor_parallel", 1) == 1
    is_alike = quantization == "fp8_per_channel" and recipe != "none" and has_all
    return "alike" if is_alike else "different"
