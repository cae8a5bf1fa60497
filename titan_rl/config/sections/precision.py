"""Whether a run multiplies in FP8."""

from collections.abc import Mapping
from typing import Any


def uses_fp8(settings: Mapping[str, Any]) -> bool:
    """Whether trainer or engines do. ``settings``: by dotted keys, of which those with defaults may be left out.

    E4M3 makes an eighth of a value of a difference in its last bit, which grows from layer to layer. So the two sides
    disagree also where both round the same groups by the same scales."""
    return any(settings.get(key, "none") != "none" for key in ("generator.quantization", "float8.recipe_name"))
