"""A Hugging Face directory becomes a TorchTitan ModelSpec, by its family (families.py)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from titan_rl.compat.torchtitan.trainer import without_trainer
from titan_rl.config.model_directory.config_checks import VISION, check_plain_weights, read_config
from titan_rl.config.sections.schema import LoraConfig
from titan_rl.models.families.qwen2_5_vl import with_text_sizes
from titan_rl.models.families.registry import PREDICTION_LAYERS, Family, find_family
from titan_rl.models.layers.decoder import SequenceParallelConfig
from titan_rl.models.layers.rope import cut_positions, num_positions
from titan_rl.models.value_head import ValueHead
from titan_rl.models.weights.lora import with_adapters
from titan_rl.models.weights.shards import decoder_of


def read_hf_config(path: str | Path, family: Family | None = None) -> PreTrainedConfig:
    """Config of an HF directory, checked. ``family``: overrides the entry of FAMILIES.

    Errors: ValueError for a model that the trainer cannot build.
    """
    read_config(Path(path))
    values = PreTrainedConfig.get_config_dict(path)[0]
    model_type = values.get("model_type")
    family = find_family(model_type, family, values.get("architectures"))
    check_plain_weights(values)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers does not know model type {model_type!r}: register it with AutoConfig.register")
    hf = AutoConfig.from_pretrained(path)
    if hf.model_type in VISION:
        hf = with_text_sizes(hf)
    for key, required_values in family.required.items():
        if getattr(hf, key, required_values) != required_values:
            raise ValueError(f"{key} = {getattr(hf, key)!r} in config.json is not supported, only {required_values!r}")
    family.model_config(hf)  # raises for a model that it cannot build
    return hf


def longest_rollout(seq_len: int, path: str | Path, family: Family | None = None) -> int:
    """Maximum tokens of a rollout, prompt included, by packed row and model positions."""
    return min(seq_len, num_positions(read_hf_config(path, family)))


def model_config(hf: PreTrainedConfig, family: Family | None = None) -> Decoder.Config:
    """TorchTitan's model config for an HF config."""
    return find_family(hf.model_type, family, hf.architectures).model_config(hf)


def model_spec(path: str | Path, family: Family | None = None, lora: LoraConfig | None = None) -> ModelSpec:
    """The TorchTitan ModelSpec of an HF directory. Errors: those of ``read_hf_config``, of the family and of
    ``with_adapters``."""
    return spec_of(read_hf_config(path, family), Path(path).name, family, lora)


def spec_of(hf: PreTrainedConfig, name: str, family: Family | None = None, lora: LoraConfig | None = None) -> ModelSpec:
    """TorchTitan ModelSpec of a parsed config.json."""
    family = find_family(hf.model_type, family, hf.architectures)
    spec = ModelSpec(
        name=hf.model_type,
        flavor=name,
        model=family.model_config(hf),
        parallelize_fn=family.parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=family.adapter,
    )
    return with_adapters(spec, lora) if lora else spec


def prediction_layer_spec(hf: PreTrainedConfig) -> ModelSpec:
    """TorchTitan ModelSpec of a policy's first layer for multi-token prediction. ``hf``: the policy's config."""
    return spec_of(hf, "", PREDICTION_LAYERS[hf.model_type])


def parameter_names(spec: ModelSpec) -> list[str]:
    """TorchTitan's names of all trained parameters."""
    with torch.device("meta"):
        model = spec.model.build()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def apply_parallelism(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
    """Fill in TorchTitan's sharding declarations, and limit positions to the run's rows."""
    model = decoder_of(spec)
    cut_positions(model, training.seq_len)
    cast(SequenceParallelConfig, model).sequence_parallel = parallelism.enable_sequence_parallel
    config = SimpleNamespace(
        parallelism=replace(parallelism, context_parallel_degree=1),  # attention sees whole rows
        training=training,
        compile=CompileConfig(),
        debug=SimpleNamespace(moe_force_load_balance=False),
    )
    with without_trainer():
        model.update_from_config(config=config)
    head = model.lm_head
    if isinstance(head, ValueHead.Config):
        head.shard()
    else:
        assert head.sharding_config is not None
        # statistics are complete on every rank, and logits carry their own placement
        head.sharding_config = replace(head.sharding_config, out_src_shardings=None, out_dst_shardings=None)
