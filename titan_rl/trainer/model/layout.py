"""Checks of ``[parallelism]``, ``[compile]`` and ``[float8]`` against a model, before any process starts."""

from math import ceil

import torch

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig
from transformers import PreTrainedConfig

from titan_rl.compat.torchtitan.pipeline import modules_of_stages
from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.model_directory.config_checks import VISION
from titan_rl.config.model_directory.draft_heads import is_draft_head
from titan_rl.config.sections.precision import layers_without_fp8
from titan_rl.data.storage.routed_experts import ExpertShape
from titan_rl.models.compiling import why_not_compiled
from titan_rl.models.families.registry import Family
from titan_rl.models.float8 import Float8Config, float8_names, is_installed, linear_names, why_not_on_gpu
from titan_rl.models.layers.attention import PackedAttention
from titan_rl.models.layers.moe import ReplayingBlock
from titan_rl.models.spec import model_config
from titan_rl.trainer.titan_config import TitanConfig


def experts_of(hf: PreTrainedConfig, family: Family | None = None) -> ExpertShape | None:
    """Mixtures of experts of a model; None if it has none."""
    mixtures = [getattr(layer, "moe", None) for layer in model_config(hf, family).layers]
    first = next((mixture for mixture in mixtures if mixture is not None), None)
    if first is None:
        return None
    return ExpertShape(tuple(each is not None for each in mixtures), first.num_experts, first.router.top_k)


def check_replay(hf: PreTrainedConfig, family: Family | None = None) -> None:
    """Check that a model's routers can be given their choices. Errors: ConfigError."""
    mixtures = [layer for layer in model_config(hf, family).layers if getattr(layer, "moe", None) is not None]
    if not mixtures:
        raise ConfigError("algorithm.routing = 'replay': the model has no experts; leave it out")
    with torch.device("meta"):
        blocks = [layer.build() for layer in mixtures]
    if not all(isinstance(block, ReplayingBlock) for block in blocks):
        raise ConfigError(
            "algorithm.routing = 'replay': the blocks of model.family take no routed experts; let them inherit from "
            "titan_rl.models.layers.moe.ReplayingBlock"
        )


def check_layout(hf: PreTrainedConfig, parallelism: ParallelismConfig, family: Family | None = None) -> None:
    """Check a layout against a model. Errors: ConfigError with the reason and what to change."""
    experts = getattr(hf, "num_experts", 0) or getattr(hf, "num_local_experts", 0)
    if hf.model_type in VISION:
        check_uncut(parallelism, "a model that sees images")
    if is_draft_head(hf.architectures):
        check_uncut(parallelism, "a draft head that learns, nor its policy")
    if parallelism.tensor_parallel_degree > 1:
        _check_tensor_parallel(hf, parallelism, experts)
    if parallelism.pipeline_parallel_degree > 1:
        _check_pipeline(hf, parallelism)
    if parallelism.context_parallel_degree > 1:
        _check_context_parallel(hf, parallelism, family)
    _check_experts(hf, parallelism, experts)


def check_uncut(parallelism: ParallelismConfig, what: str) -> None:
    """Errors: ConfigError for a layout of more than data-parallel ranks."""
    for kind in ("tensor", "pipeline", "context"):
        if (degree := getattr(parallelism, f"{kind}_parallel_degree")) > 1:
            raise ConfigError(
                f"parallelism.{kind}_parallel_degree = {degree} cannot cut {what}: use "
                f"data_parallel_shard_degree instead"
            )


def check_products(
    hf: PreTrainedConfig,
    titan: TitanConfig,
    family: Family | None = None,
    *,
    on_cpu: bool | None = None,
) -> None:
    """Check that ``[compile]`` and ``[float8]`` can compute a model on a run's devices.

    ``on_cpu``: whether the run is on a CPU of some machine; None: on this process's device. Errors: ConfigError; what
    GPUs of other hosts can do is checked when the model is built there."""
    if titan.float8.is_on:
        _check_float8(hf, titan.float8, family, is_here=on_cpu is None)
    here_on_cpu = device.DEVICE_TYPE == "cpu"
    if titan.compile.enable and (here_on_cpu if on_cpu is None else on_cpu):
        raise ConfigError("compile.enable needs an accelerator: packed rows change length at every step on a CPU")
    if not titan.compile.enable or "model" not in titan.compile.components or here_on_cpu:
        return
    dtype = TORCH_DTYPE_MAP[titan.training.mixed_precision_param]
    if why := why_not_compiled(model_config(hf, family), torch.device(device.DEVICE_TYPE), dtype):
        raise ConfigError(f"compile.enable = true {why}")


def _check_float8(hf: PreTrainedConfig, settings: Float8Config, family: Family | None, *, is_here: bool) -> None:
    setting = f"float8.recipe_name = {settings.recipe_name!r}"
    if not is_installed():
        raise ConfigError(f"{setting} needs torchao: pip install 'titan-rl[float8]'")
    if is_here and device.DEVICE_TYPE == "cuda" and (why := why_not_on_gpu()):
        raise ConfigError(f"{setting} {why}")
    if found := layers_without_fp8(hf):
        raise ConfigError(f"{setting}: {found[0]} is not trained in FP8 here: leave it out")
    config = model_config(hf, family)
    names = linear_names(config)
    for part in settings.filter_fqns:
        if not any(part in name for name in names):
            raise ConfigError(f"float8.filter_fqns: no linear layer has {part!r} in its name: {nearest(part, names)}")
    if not float8_names(config, settings):
        raise ConfigError(
            f"{setting}: no linear layer is left for it, whose inputs and outputs must be multiples of 16; leave it out"
        )


def _check_tensor_parallel(hf: PreTrainedConfig, parallelism: ParallelismConfig, experts: int) -> None:
    degree = parallelism.tensor_parallel_degree
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()):
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {degree} cannot share the model's linear attention (layer_types): "
            f"use data_parallel_shard_degree or pipeline_parallel_degree instead"
        )
    split = {"num_attention_heads": hf.num_attention_heads, "num_key_value_heads": hf.num_key_value_heads}
    if not experts or getattr(hf, "first_k_dense_replace", 0):
        split["intermediate_size"] = hf.intermediate_size
    if experts and (parallelism.expert_parallel_degree == 1 or getattr(hf, "n_shared_experts", 0)):
        split |= _expert_size(hf)
    for name, size in split.items():
        if size % degree:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degree} must divide the model's {name} = {size}: "
                f"lower it, or spread over data_parallel_shard_degree instead"
            )
    if (degree - 1) * ceil(hf.vocab_size / degree) >= hf.vocab_size:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {degree} leaves some ranks without any of the model's vocab_size = "
            f"{hf.vocab_size}: lower it"
        )
    if parallelism.expert_parallel_degree > 1 and not parallelism.enable_sequence_parallel:
        raise ConfigError(
            "parallelism.enable_sequence_parallel = false does not work with expert parallelism: leave it out"
        )


def _check_context_parallel(hf: PreTrainedConfig, parallelism: ParallelismConfig, family: Family | None) -> None:
    degree, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    attention = [getattr(layer, "attention", None) for layer in model_config(hf, family).layers]
    if not all(isinstance(getattr(each, "inner_attention", None), PackedAttention.Config) for each in attention):
        raise ConfigError(
            f"parallelism.context_parallel_degree = {degree} cannot spread the rows of this model, whose layers mix "
            f"tokens otherwise than by PackedAttention, such as by linear attention: use data_parallel_shard_degree or "
            f"pipeline_parallel_degree instead"
        )
    heads = hf.num_attention_heads
    if heads % (degree * tensor):
        raise ConfigError(
            f"parallelism.context_parallel_degree x tensor_parallel_degree = {degree * tensor} must divide the model's "
            f"num_attention_heads = {heads}: lower one of them, or spread over data_parallel_shard_degree instead"
        )


def _expert_size(hf: PreTrainedConfig) -> dict[str, int]:
    """An expert's width, by its key in config.json."""
    name = "moe_intermediate_size" if hasattr(hf, "moe_intermediate_size") else "intermediate_size"
    return {name: getattr(hf, name)}


def _check_pipeline(hf: PreTrainedConfig, parallelism: ParallelismConfig) -> None:
    degree = parallelism.pipeline_parallel_degree
    if hf.tie_word_embeddings:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree} cannot train tied embeddings, which the first and the "
            f"last stage would share: use a model with tie_word_embeddings = false, or other kinds of parallelism"
        )
    stages = stage_modules(parallelism, hf.num_hidden_layers)
    per_stage = parallelism.module_fqns_per_model_part
    expected = ["tok_embeddings", *(f"layers.{layer}" for layer in range(hf.num_hidden_layers)), "norm", "lm_head"]
    if per_stage is not None and sum(per_stage, []) != expected:
        raise ConfigError(
            "parallelism.module_fqns_per_model_part must hold tok_embeddings, every layers.N, norm and lm_head once "
            "and in this order: correct it, or leave it out"
        )
    several = parallelism.pipeline_parallel_schedule != "1F1B"
    if len(stages) % degree or (len(stages) > degree) != several:
        num_stages = f"a multiple of {degree} above {degree}" if several else f"{degree}"
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} wants {num_stages} "
            f"stages, but there are {len(stages)}: change pipeline_parallel_layers_per_stage, or leave it out"
        )


def stage_modules(parallelism: ParallelismConfig, num_layers: int) -> list[list[str]]:
    """Module names of each pipeline stage. Errors: ConfigError if the model cannot be split so."""
    if parallelism.module_fqns_per_model_part is not None:
        return parallelism.module_fqns_per_model_part
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    num_stages = parallelism.pipeline_parallel_degree * (1 if parallelism.pipeline_parallel_schedule == "1F1B" else 2)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        num_stages = ceil((num_layers + first + last) / parallelism.pipeline_parallel_layers_per_stage)
    if num_layers < num_stages:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} with "
            f"{parallelism.pipeline_parallel_schedule} makes {num_stages} stages of {num_layers} layers: lower it"
        )
    try:
        return modules_of_stages(num_stages, num_layers, first, last)
    except ValueError as error:
        raise ConfigError(
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first}, _last_ = {last}: {error}; lower them"
        ) from None


def _check_experts(hf: PreTrainedConfig, parallelism: ParallelismConfig, experts: int) -> None:
    degree, tensor = parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree
    if not experts:
        if degree > 1:
            raise ConfigError(f"parallelism.expert_parallel_degree = {degree}, but the model is dense: leave it out")
        return
    if experts % degree:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {degree} must divide the model's num_experts = {experts}: lower it"
        )
    shard = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    if degree > 1:
        ranks, each, pieces = shard * tensor, shard * tensor // degree, 1
    else:
        ranks, each, pieces = shard * parallelism.data_parallel_replicate_degree, shard, tensor
    # with more ranks than experts, FSDP splits each expert, and must split it evenly
    sizes = {name: size // pieces for name, size in _expert_size(hf).items()} | {"hidden_size": hf.hidden_size}
    for name, size in sizes.items():
        if ranks > experts and size % each:
            raise ConfigError(
                f"parallelism: {each * pieces} ranks share each expert, so they must divide the model's {name} = "
                f"{getattr(hf, name)}: change data_parallel_shard_degree or expert_parallel_degree"
            )
