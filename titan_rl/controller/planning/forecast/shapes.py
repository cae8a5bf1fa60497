"""Models of which a plan knows the shapes: by name, from a file, or key by key. No download is needed.

A shape is what a config.json says. It becomes a directory that holds one, so that everything else reads a model's
shapes in one way.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError, nearest, read_toml

_LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=128256,
    hidden_act="silu",
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    num_key_value_heads=8,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
_QWEN2 = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    vocab_size=151936,
    hidden_act="silu",
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    use_sliding_window=False,
    tie_word_embeddings=False,
)
_QWEN3 = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    attention_bias=False,
    use_sliding_window=False,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
_QWEN3_MOE = _QWEN3 | dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    num_key_value_heads=4,
)


def _sized(
    base: dict[str, Any], hidden: int, intermediate: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers)
    return base | sizes | dict(num_attention_heads=heads) | others


SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": _sized(_LLAMA, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B-Instruct": _sized(_LLAMA, 3072, 8192, 28, 24, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B-Instruct": _sized(_LLAMA, 4096, 14336, 32, 32),
    "meta-llama/Llama-3.3-70B-Instruct": _sized(_LLAMA, 8192, 28672, 80, 64),
    "meta-llama/Llama-3.1-405B-Instruct": _sized(_LLAMA, 16384, 53248, 126, 128),
    "Qwen/Qwen2.5-0.5B-Instruct": _sized(_QWEN2, 896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _sized(_QWEN2, 1536, 8960, 28, 12, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-3B-Instruct": _sized(_QWEN2, 2048, 11008, 36, 16, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B-Instruct": _sized(_QWEN2, 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
    "Qwen/Qwen2.5-32B-Instruct": _sized(_QWEN2, 5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=152064),
    "Qwen/Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _sized(_QWEN3, 4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _sized(_QWEN3, 5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _sized(_QWEN3_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": _sized(_QWEN3_MOE, 4096, 12288, 94, 64, moe_intermediate_size=1536),
}
"""The sizes in these models' own config.json files (without rotary scaling, which has no shape)."""
_SHORT = {name.split("/")[1].casefold(): name for name in SHAPES} | {"llama-70b": "meta-llama/Llama-3.3-70B-Instruct"}


def is_known(name: str) -> bool:
    return name in SHAPES or name.casefold() in _SHORT


def known(name: str) -> dict[str, Any]:
    return dict(SHAPES[name if name in SHAPES else _SHORT[name.casefold()]])


def shape_of(name: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``name``: one of SHAPES, with or without its organization, or a file of config.json's keys (JSON, TOML);
    ``overrides``: what differs. Errors: ConfigError."""
    base = _base(name) if name else {}
    shape = base | dict(overrides)
    if "model_type" not in shape:
        raise ConfigError(
            "a shape is the keys of a config.json: give --shape NAME or FILE, or --shape.model_type llama and its sizes"
        )
    return shape


def _base(name: str) -> dict[str, Any]:
    if is_known(name):
        return known(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--shape {name!r} is no file, and no model of this name is known: {nearest(name, SHAPES)}")
    if path.suffix != ".json":
        return read_toml(path)
    try:
        return dict(read_json(path))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--shape {name!r} cannot be read as a config.json: {error}") from None


def write_shape(shape: Mapping[str, Any], folder: Path) -> str:
    """A directory with that config.json, and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)
