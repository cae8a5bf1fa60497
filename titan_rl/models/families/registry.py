"""The model families: one entry for each ``model_type`` of a Hugging Face config.json.

Parameters keep Hugging Face's shapes and row order (separate q, k and v; half-rotated rope), so a tensor of the file is
a parameter of the model under another name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from transformers import PreTrainedConfig

from titan_rl.config.load import ConfigError
from titan_rl.config.model_directory.draft_heads import is_draft_head
from titan_rl.config.plugins import resolve
from titan_rl.models.families import deepseek_v3, eagle3, gemma3, glm4, gpt_oss, mtp, olmo2, phi3, qwen2_5_vl, qwen3_5
from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.moe import ExpertBlock, moe_config
from titan_rl.models.weights.names import (
    DeepSeekV3Names,
    Gemma3Names,
    Glm4Names,
    GptOssNames,
    Names,
    Olmo2Names,
    Qwen35Names,
)

REQUIRED: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""The values that ``decoder_config`` needs in config.json; a key that is left out there is fine."""
UNTIED: Mapping[str, object] = {"tie_word_embeddings": False}
"""Where vLLM's model has an output head of its own, which a tied model's weights would leave unfilled."""


@dataclass(frozen=True)
class Family:
    """Builder, sharding and tensor names of one ``model_type``.

    For a family of your own, write a module that every process can import, and in it a ``Family``::

        SMALL_LLAMA = Family(
            partial(decoder_config, model=PackedLlama, block=Llama3TransformerBlock),
            parallelize_llama,
            required={**REQUIRED, "tie_word_embeddings": True},
        )

    Then give it in the TOML: ``[model] family = "my_package.my_module:SMALL_LLAMA"``. Layers of another kind need a
    TorchTitan block of your own. Another decoder needs a class of your own that inherits from ``PackedDecoder`` and a
    TorchTitan ``Decoder``, and whose ``Config`` has a field ``sequence_parallel: bool = True``. Two more things are
    needed outside titan_rl: transformers must know the ``model_type`` (if it does not, call ``AutoConfig.register`` in
    your module), and vLLM must know the ``architectures`` of config.json.
    """

    model_config: Callable[[PreTrainedConfig], Decoder.Config]
    """From a directory's config to TorchTitan's config of the model. Errors: ValueError for what it cannot build."""
    parallelize: Callable
    """TorchTitan's ``parallelize_fn``: shards a model, or a pipeline stage of one."""
    adapter: type = Names
    """TorchTitan's state-dict adapter; only its names are used."""
    required: Mapping[str, object] = field(default_factory=lambda: REQUIRED)
    """Keys of config.json with the only value that this family computes."""


class PackedLlama(PackedDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        sequence_parallel: bool = True


class PackedQwen3(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True


_llama_config = partial(decoder_config, model=PackedLlama, block=Llama3TransformerBlock)
_qwen3_config = partial(
    decoder_config,
    model=PackedQwen3,
    block=Qwen3TransformerBlock,
    attention=partial(layer_configs.attention, qk_norm=True),
)

FAMILIES = {
    "deepseek_v3": Family(
        deepseek_v3.deepseek_v3_config,
        parallelize_deepseekv3,
        DeepSeekV3Names,
        required={**deepseek_v3.REQUIRED, **UNTIED},
    ),
    "gemma3_text": Family(gemma3.gemma3_config, parallelize_qwen3, Gemma3Names, required=gemma3.REQUIRED),
    "glm4": Family(glm4.glm4_config, parallelize_llama, Glm4Names, required=glm4.REQUIRED),
    "glm4_moe": Family(
        partial(glm4.glm4_moe_config, model=PackedQwen3), parallelize_qwen3, required={**glm4.REQUIRED, **UNTIED}
    ),
    "gpt_oss": Family(gpt_oss.gpt_oss_config, parallelize_qwen3, GptOssNames, required={**gpt_oss.REQUIRED, **UNTIED}),
    "llama": Family(_llama_config, parallelize_llama),
    "mistral": Family(_llama_config, parallelize_llama),
    "olmo2": Family(olmo2.olmo2_config, parallelize_qwen3, Olmo2Names),
    "phi3": Family(phi3.phi3_config, parallelize_llama),
    "qwen2": Family(
        partial(_llama_config, attention=partial(layer_configs.attention, qkv_bias=True)), parallelize_llama
    ),
    "qwen2_5_vl": Family(qwen2_5_vl.qwen2_5_vl_config, parallelize_llama, qwen2_5_vl.Qwen25VLNames),
    "qwen3": Family(_qwen3_config, parallelize_qwen3),
    "qwen3_5_text": Family(qwen3_5.qwen3_5_config, parallelize_qwen3, Qwen35Names, required=qwen3_5.REQUIRED),
    "qwen3_next": Family(
        qwen3_5.qwen3_5_config, parallelize_qwen3, Qwen35Names, required={**qwen3_5.REQUIRED, **UNTIED}
    ),
    "qwen3_moe": Family(partial(_qwen3_config, block=ExpertBlock, moe=moe_config), parallelize_qwen3),
}
"""By ``model_type``."""
PREDICTION_LAYERS = {
    "glm4_moe": Family(mtp.prediction_layer_config, parallelize_qwen3, mtp.PredictionNames, required={}),
}
"""Of the layers for multi-token prediction by which policies may draft, by the policy's ``model_type``."""
_EAGLE3 = Family(eagle3.eagle3_config, parallelize_llama, eagle3.Eagle3Names)


def find_family(model_type: str | None, custom: Family | None = None, architectures: list[str] | None = None) -> Family:
    """Family of a model: that of draft heads, ``custom``, or the entry of FAMILIES. ``architectures``: as its
    config.json has them. Errors: ValueError if there is none."""
    if is_draft_head(architectures):
        return _EAGLE3
    if custom is not None:
        return custom
    if model_type is None or model_type not in FAMILIES:
        raise ValueError(
            f"model type {model_type!r} is not supported: use one of {', '.join(sorted(FAMILIES))}, or give a family "
            f"of your own as model.family"
        )
    return FAMILIES[model_type]


def make_family(reference: str, folders: Sequence[str]) -> Family | None:
    """Family named by ``model.family``; None if empty. Errors: ConfigError."""
    if not reference:
        return None
    family = resolve("model.family", reference, folders)
    if not isinstance(family, Family):
        raise ConfigError(
            f"model.family = {reference!r} must name a titan_rl.models.families.registry.Family, not {family!r:.80}"
        )
    return family
