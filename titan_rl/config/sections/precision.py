"""Whether a run multiplies in FP8, and which models cannot; whether its two sides compute alike."""

from collections.abc import Mapping
from typing import Any

_WITHOUT_FP8 = {
    "a mixture of experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "latent attention": ("kv_lora_rank",),
    "linear attention": ("linear_num_value_heads",),
    "a vision tower": ("vision_config",),
}
"""Kinds of layers, by the keys of config.json that tell of them."""


def layers_without_fp8(hf: Any) -> tuple[str, str] | None:
    """Kind of layers that neither trainer nor engines have in FP8, and its key in config.json; None: there is none.

    ``hf``: a model's config."""
    found = ((kind, key) for kind, keys in _WITHOUT_FP8.items() for key in keys if getattr(hf, key, None))
    return next(found, None)


def uses_fp8(settings: Mapping[str, Any]) -> bool:
    """Whether trainer or engines do. ``settings``: by dotted keys, of which those with defaults may be left out.

    E4M3 makes an eighth of a value of a difference in its last bit, which grows from layer to layer. So the two sides
    disagree also where both round the same groups by the same scales."""
    return any(settings.get(key, "none") != "none" for key in ("generator.quantization", "float8.recipe_name"))


def invariant_parts(titan: Mapping[str, Mapping[str, Any]], engine_ranks: int) -> int:
    """Parts of a product that ranks share, on both sides, with ``debug.batch_invariant``; 0 without it.

    ``titan``: TorchTitan's tables, of which keys with defaults may be left out; ``engine_ranks``: of one engine."""
    trainer_ranks = titan.get("parallelism", {}).get("tensor_parallel_degree", 1)
    return max(trainer_ranks, engine_ranks) if titan.get("debug", {}).get("batch_invariant") else 0
