"""Names and shapes of the tensors that a config.json asks for, for the model types whose names are written here.

``models/spec.py`` knows them for every family, by building the model without memory; its imports take seconds. This
table tells most wrong directories before. ``tests/config/test_model_directories.py`` holds it to that.
"""

from collections.abc import Iterator
from typing import Any

Shape = tuple[str, ...]
_NORMS = {"input_layernorm.weight": ("hidden_size",), "post_attention_layernorm.weight": ("hidden_size",)}
_OUT = {"self_attn.o_proj.weight": ("hidden_size", "queries")}
_ATTENTION = _OUT | {
    "self_attn.q_proj.weight": ("queries", "hidden_size"),
    "self_attn.k_proj.weight": ("keys", "hidden_size"),
    "self_attn.v_proj.weight": ("keys", "hidden_size"),
}
_BIASES = {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", "queries"), ("k", "keys"), ("v", "keys"))}
_QK_NORM = {"self_attn.q_norm.weight": ("head_dim",), "self_attn.k_norm.weight": ("head_dim",)}
_DOWN = {"mlp.down_proj.weight": ("hidden_size", "intermediate_size")}
_SWIGLU = _DOWN | {
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
}
_PHI3 = (
    _OUT
    | _DOWN
    | {
        "self_attn.qkv_proj.weight": ("queries_keys_values", "hidden_size"),
        "mlp.gate_up_proj.weight": ("gate_up", "hidden_size"),
    }
)
_AROUND = {"post_attention_layernorm.weight": ("hidden_size",), "post_feedforward_layernorm.weight": ("hidden_size",)}
_WHOLE_QK_NORM = {"self_attn.q_norm.weight": ("queries",), "self_attn.k_norm.weight": ("keys",)}
_GEMMA3_NORMS = _NORMS | _AROUND | {"pre_feedforward_layernorm.weight": ("hidden_size",)}
_EXPERTS = {
    "mlp.gate.weight": ("num_experts", "hidden_size"),
    "mlp.experts.{}.gate_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "mlp.experts.{}.up_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "mlp.experts.{}.down_proj.weight": ("hidden_size", "moe_intermediate_size"),
}
LAYERS: dict[str, dict[str, Shape]] = {
    "deepseek_v3": {},  # left to the built model, as all whose layers differ
    "gemma3_text": _GEMMA3_NORMS | _ATTENTION | _QK_NORM | _SWIGLU,
    "glm4": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "llama": _NORMS | _ATTENTION | _SWIGLU,
    "mistral": _NORMS | _ATTENTION | _SWIGLU,
    "olmo2": _AROUND | _ATTENTION | _WHOLE_QK_NORM | _SWIGLU,
    "phi3": _NORMS | _PHI3,
    "qwen2": _NORMS | _ATTENTION | _BIASES | _SWIGLU,
    "qwen2_5_vl": {},
    "qwen3": _NORMS | _ATTENTION | _QK_NORM | _SWIGLU,
    "qwen3_5_text": {},
    "qwen3_moe": _NORMS | _ATTENTION | _QK_NORM | _EXPERTS,
    "qwen3_next": {},
}
"""By ``model_type``, for all that ``models/families/registry.py`` builds: a layer's tensors, and the sizes in
config.json that their shapes are made of."""
_TIED_BY_DEFAULT = {"gemma3_text"}


def head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def num_experts(config: dict[str, Any]) -> int | None:
    """Under the name that Qwen gave it, the one that transformers writes, or DeepSeek's."""
    return config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")


def is_tied(config: dict[str, Any]) -> bool:
    return config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Name to shape, for a config.json whose sizes were checked; None where this table does not tell."""
    layer = LAYERS.get(config.get("model_type", ""))
    if not layer:
        return None
    sizes = {name: size for name, size in (config | _derived(config)).items() if size is not None}
    try:
        return {name: tuple(sizes[size] for size in shape) for name, shape in _templates(config, layer)}
    except KeyError:  # a size that is left to the default of transformers
        return None


def _derived(config: dict[str, Any]) -> dict[str, int | None]:
    heads, head_dim, width = config["num_attention_heads"], head_size(config), config.get("intermediate_size")
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    return {
        "head_dim": head_dim,
        "queries": queries,
        "keys": keys,
        "queries_keys_values": queries + 2 * keys,
        "gate_up": width and 2 * width,
        "num_experts": num_experts(config),
    }


def _templates(config: dict[str, Any], layer: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", ("vocab_size", "hidden_size")
    yield "model.norm.weight", ("hidden_size",)
    if not is_tied(config):
        yield "lm_head.weight", ("vocab_size", "hidden_size")
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            for expert in range(num_experts(config) or 0) if "{}" in name else (0,):
                yield f"model.layers.{number}.{name.format(expert)}", shape
