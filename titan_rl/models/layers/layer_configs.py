"""TorchTitan's configs of a layer's parts, by the sizes of a config.json: what most families share.

Weights always come from a file, so nothing is initialized.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.models.common.attention import BaseAttention, GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.param_init import skip_param_init
from transformers import PreTrainedConfig

from titan_rl.models.layers.attention import PackedAttention
from titan_rl.models.layers.memory_saving import LeanFeedForward, LeanRMSNorm, ShiftedNorm
from titan_rl.models.layers.rope import rope_config

FROM_FILE = {"weight": skip_param_init, "bias": skip_param_init}


def head_size(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def window(hf: PreTrainedConfig, layer: int) -> int | None:
    """Sliding window of a layer in tokens, the query included; None: full attention. Errors: ValueError."""
    layer_types = getattr(hf, "layer_types", None)
    kind = layer_types[layer] if layer_types else "sliding_attention"
    if kind not in ("sliding_attention", "full_attention"):
        raise ValueError(f"layer_types of {kind!r} are not supported, only 'sliding_attention' and 'full_attention'")
    return getattr(hf, "sliding_window", None) if kind == "sliding_attention" else None


def norm(hf: PreTrainedConfig, size: int) -> LeanRMSNorm.Config:
    return LeanRMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=FROM_FILE)


def shifted_norm(hf: PreTrainedConfig, size: int) -> ShiftedNorm.Config:
    return ShiftedNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=FROM_FILE)


def attention(
    hf: PreTrainedConfig, layer: int, *, qk_norm: bool = False, qkv_bias: bool = False, rope_type: str | None = None
) -> GQAttention.Config:
    """Grouped-query attention.

    ``qk_norm``: normalize queries and keys per head, as Qwen3 does; ``qkv_bias``: their projections add something, as
    Qwen2's do; ``rope_type``: the layer type whose rotary embedding it is.
    """
    config = make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_size(hf),
        wqkv_param_init=FROM_FILE,
        wo_param_init=FROM_FILE,
        inner_attention=PackedAttention.Config(window=window(hf, layer)),
        rope=rope_config(hf, head_size(hf), rope_type),
        qk_norm=norm(hf, head_size(hf)) if qk_norm else None,
    )
    assert isinstance(config.qkv_linear, QKVLinear.Config)
    config.qkv_linear.wq.bias = config.qkv_linear.wkv.bias = qkv_bias
    return config


def feed_forward(hf: PreTrainedConfig, width: int | None = None) -> LeanFeedForward.Config:
    """SwiGLU; ``width``: its features, if they are not ``intermediate_size``."""
    linears = make_ffn_config(
        dim=hf.hidden_size, hidden_dim=width or hf.intermediate_size, w1_param_init=FROM_FILE, w2w3_param_init=FROM_FILE
    )
    return LeanFeedForward.Config(w1=linears.w1, w2=linears.w2, w3=linears.w3)


def layer_config(
    hf: PreTrainedConfig,
    layer: int,
    *,
    block: type[TransformerBlock],
    attention: Callable[[PreTrainedConfig, int], BaseAttention.Config] = attention,
    feed_forward: Callable[[PreTrainedConfig], Any] = feed_forward,
    moe: Callable[[PreTrainedConfig], MoE.Config] | None = None,
) -> Any:
    """A layer with a norm in front of its attention and of its SwiGLU, or of its mixture of experts ``moe``.

    The parts are functions of the config.json (``attention``: and of the layer's number).
    """
    return block.Config(
        attention_norm=norm(hf, hf.hidden_size),
        ffn_norm=norm(hf, hf.hidden_size),
        attention=attention(hf, layer),
        moe=moe(hf) if moe else None,
        feed_forward=None if moe else feed_forward(hf),
    )
