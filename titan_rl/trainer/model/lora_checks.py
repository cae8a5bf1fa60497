"""Checks of ``[lora]`` against a model, from names and shapes, before any process starts."""

from pathlib import Path

import torch
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.protocols.model_spec import ModelSpec
from transformers import PreTrainedConfig

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import Config
from titan_rl.models.families.registry import Family
from titan_rl.models.spec import spec_of
from titan_rl.models.weights.lora import targets_of
from titan_rl.models.weights.peft_files import check_adapter, form_of
from titan_rl.models.weights.shards import is_adapter, local_shards
from titan_rl.trainer.model.layout import stage_modules
from titan_rl.trainer.titan_config import TitanConfig
from titan_rl.trainer.titan_limits import check_patterns


def check_lora(hf: PreTrainedConfig, config: Config, titan: TitanConfig, family: Family | None) -> None:
    """Check ``[lora]`` against a model. Errors: ConfigError with the reason and what to change."""
    if titan.float8.is_on:
        raise ConfigError(
            f"lora.rank = {config.lora.rank} and float8.recipe_name = {titan.float8.recipe_name!r}: adapters are not "
            f"trained on layers in FP8; leave one of them out"
        )
    try:
        targets = targets_of(spec_of(hf, "", family), config.lora)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spec = spec_of(hf, "", family, config.lora)
    names, shapes = _adapters(spec)
    _check_tensor_parallel(titan, spec)
    check_patterns(titan.optimizer.param_groups, names, are_adapters=True)
    _check_stages(titan, names, hf.num_hidden_layers)
    if config.lora.adapter:
        try:
            check_adapter(Path(config.lora.adapter), config.lora, targets, shapes, form_of(hf.model_type))
        except ValueError as error:
            raise ConfigError(f"lora.adapter = {config.lora.adapter!r}: {error}") from None


def _adapters(spec: ModelSpec) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """TorchTitan's names of all that is trained; shapes by Hugging Face's."""
    with torch.device("meta"):
        model = spec.model.build()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(map(is_adapter, names)), "the converter left something besides adapters to be trained"
    return names, {shard.name: shard.shape for shard in local_shards(spec, [model], adapters=True)}


def _check_tensor_parallel(titan: TitanConfig, spec: ModelSpec) -> None:
    """GPT-OSS's output projection works on each rank's own part, where TorchTitan's adapter wants a DTensor."""
    degree = titan.parallelism.tensor_parallel_degree
    projections = (config for _, config, _, _ in spec.model.traverse(ScaledBiasRowwiseLinear.Config))
    if degree > 1 and any(hasattr(config, "rank") for config in projections):
        raise ConfigError(
            f"lora.targets: this model's 'o_proj' cannot have an adapter with parallelism.tensor_parallel_degree = "
            f"{degree}: give lora.targets without it, or use data_parallel_shard_degree"
        )


def _check_stages(titan: TitanConfig, names: list[str], num_layers: int) -> None:
    """Every stage of a pipeline has an optimizer, which must have something to train."""
    if titan.parallelism.pipeline_parallel_degree == 1:
        return
    for number, modules in enumerate(stage_modules(titan.parallelism, num_layers)):
        if not any(name.startswith(f"{module}.") for name in names for module in modules):
            raise ConfigError(
                f"parallelism: stage {number} of the pipeline holds {', '.join(modules)}, none of which has an "
                f"adapter to train: give it a layer"
            )
