"""Tiny random models of every family, of sizes that are odd wherever they may be."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from titan_rl.config.model_directory.directory import read_object

SIZES = dict(
    vocab_size=101,
    hidden_size=60,
    intermediate_size=53,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
YARN |= dict(original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=220, partial_rotary_factor=0.75)
LONG |= dict(short_factor=[1.0, 1.3, 1.7], long_factor=[2.0, 4.0, 8.0])
EVEN = dict(hidden_size=40, intermediate_size=54, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6)
"""What tensor parallelism must divide; the vocabulary of 101 words, it need not."""
GEMMA = {"full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0), "sliding_attention": PLAIN}
HALF = PLAIN | dict(partial_rotary_factor=0.5)
EXPERTS = dict(n_routed_experts=9, num_experts_per_tok=3, n_group=3, topk_group=2, n_shared_experts=2)
EXPERTS |= dict(moe_intermediate_size=17, first_k_dense_replace=1, routed_scaling_factor=1.7)
LATENT = dict(q_lora_rank=23, kv_lora_rank=19, qk_nope_head_dim=7, qk_rope_head_dim=6, v_head_dim=11)
LATENT |= dict(num_key_value_heads=6, topk_method="noaux_tc", scoring_func="sigmoid", rms_norm_eps=1e-6)
DEEP_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=0.9)
DEEP_YARN |= dict(mscale_all_dim=0.7, original_max_position_embeddings=64)
LINEAR = dict(linear_key_head_dim=7, linear_value_head_dim=9, linear_num_key_heads=2, linear_num_value_heads=6)
LINEAR |= dict(linear_conv_kernel_dim=3)
SHARED = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=17, shared_expert_intermediate_size=11)
SHARED |= dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
CASES = {
    "qwen2": ("qwen2", dict(tie_word_embeddings=False)),
    "qwen2 tied": ("qwen2", dict(tie_word_embeddings=True)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=10)),
    "mistral window": ("mistral", dict(sliding_window=7)),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", dict(hidden_size=36)),
    "phi3 window": ("phi3", dict(hidden_size=36, sliding_window=7)),
    "phi3 longrope": ("phi3", dict(hidden_size=48, rope_parameters=LONG, original_max_position_embeddings=220)),
    "gemma3_text": (
        "gemma3_text",
        dict(head_dim=10, sliding_window=7, query_pre_attn_scalar=13, rope_parameters=GEMMA)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "deepseek_v3": ("deepseek_v3", LATENT | EXPERTS),
    "deepseek_v3 yarn": ("deepseek_v3", LATENT | EXPERTS | dict(q_lora_rank=None, rope_parameters=DEEP_YARN)),
    "glm4": ("glm4", dict(head_dim=12, rope_parameters=HALF)),
    "glm4 without biases": ("glm4", dict(head_dim=12, rope_parameters=HALF, attention_bias=False)),
    "glm4_moe": ("glm4_moe", dict(head_dim=12, rope_parameters=HALF, attention_bias=True) | EXPERTS),
    "glm4_moe 2": (
        "glm4_moe",
        dict(head_dim=12, rope_parameters=HALF, use_qk_norm=True)
        | EXPERTS
        | dict(n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=0, n_shared_experts=1),
    ),
    "qwen3_5_text": ("qwen3_5_text", LINEAR | dict(head_dim=12, rope_parameters=HALF, num_hidden_layers=5)),
    "qwen3_next": ("qwen3_next", LINEAR | SHARED | dict(head_dim=12, rope_parameters=HALF, norm_topk_prob=False)),
    "gpt_oss": (
        "gpt_oss",
        dict(head_dim=10, sliding_window=7, num_local_experts=5, num_experts_per_tok=2) | dict(rope_parameters=YARN),
    ),
}


_EXPERTS_OF = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), dict(n_routed_experts=12, moe_intermediate_size=18)),
    "qwen3_next": dict(num_experts=6, moe_intermediate_size=18),
}


def even(case: str) -> dict:
    """Sizes that two ranks can share, whatever the layout."""
    if (model_type := CASES[case][0]) not in _EXPERTS_OF:
        return EVEN
    sizes = {key: size for key, size in EVEN.items() if key != "num_local_experts"} | _EXPERTS_OF[model_type]
    return sizes | ({"num_key_value_heads": sizes["num_attention_heads"]} if model_type == "deepseek_v3" else {})


@torch.no_grad()
def make(path: Path, case: str, *, scale: float = 0.3, **changes) -> PreTrainedModel:
    """A model of random weights, so uneven that no norm, bias, sink or head can be taken for another.

    States of linear attention keep what they hold over tens of tokens, as in a trained model.
    """
    model_type, settings = CASES[case]
    keys = deepcopy({**SIZES, "rope_parameters": PLAIN, **settings, **changes})  # which transformers adds to
    config = CONFIG_MAPPING[model_type](**keys)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 2.0, generator=generator)
        else:
            parameter.normal_(0, scale, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.01, 1.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4.0, -2.0, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5, generator=generator)
    model.save_pretrained(path)
    return model


def add_prediction_layer(path: Path) -> None:
    """A layer for multi-token prediction behind a policy's, with the last one's block and random weights around it."""
    weights, config = load_file(path / "model.safetensors"), read_object(path / "config.json")
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    own, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    added = {name.replace(own, new): tensor.clone() for name, tensor in weights.items() if name.startswith(own)}
    added |= {f"{new}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{new}eh_proj.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)  # the state alone
    save_file(weights | added, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
