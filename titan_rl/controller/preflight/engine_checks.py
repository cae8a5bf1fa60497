"""What engines cannot do, or the trainer cannot follow: checked before any process starts."""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from titan_rl.algorithms.base import Algorithm
from titan_rl.config.device_defaults import generator_on, step_tokens
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.precision import layers_without_fp8
from titan_rl.config.sections.schema import Config, GeneratorConfig, RolloutConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.data.text.tokenizer import Tokenizer
from titan_rl.environments.rollout.decoding import (
    CUTS,
    PENALTIES,
    ThinkingBudget,
    changed,
    held_out_budget,
    training_budget,
)
from titan_rl.environments.rollout.prompt_checks import ThinkingCheck, encode_checked
from titan_rl.environments.rollout.suites import Suite
from titan_rl.models.batch_invariance import why_not_invariant
from titan_rl.models.families.registry import PREDICTION_LAYERS, Family
from titan_rl.models.layers.rope import num_positions
from titan_rl.models.spec import model_config, spec_of
from titan_rl.models.weights.prediction_layers import check_prediction_layers
from titan_rl.trainer.titan_config import TitanConfig

_BLOCK_TOKENS = 16
"""The smallest number of tokens that vLLM stores together."""
_CPU_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""What its CPU kernel for latent attention is compiled for."""
_VOCABULARY_UNIT = 64
"""vLLM pads a vocabulary to a multiple of it."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_VLLM_MODE = "VLLM_BATCH_INVARIANT"
_PER_BLOCK = "fp8_per_block"
_BLOCK = 128
"""Rows and columns of weights that share a scale (generator/weights/quantization/e4m3.py)."""
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_STATES = ((64, 64), (128, 128))
"""Features of keys and values that its CPU kernel for linear attention takes."""


def check_engine(
    config: Config, hf: PreTrainedConfig, seq_len: int, draft: PreTrainedConfig | None = None, *, on_cpu: bool
) -> None:
    """Check limits of an engine. ``config``: with the device's defaults. ``draft``: of a draft model, if there is one.
    Errors: ConfigError."""
    generator = config.generator
    max_model_len = min(seq_len, num_positions(hf))
    most = step_tokens(max_model_len, on_cpu=on_cpu)
    if generator.max_num_seqs > most:
        raise ConfigError(
            f"generator.max_num_seqs = {generator.max_num_seqs} is more than the {most} tokens of one engine step: "
            f"lower it"
        )
    _check_vllm_mode(config, on_cpu=on_cpu)
    if on_cpu:
        _check_cpu_kernels(hf, generator.dtype)
    if generator.is_quantized:
        _check_quantization(hf, generator)
    models = [hf] if draft is None else [hf, draft]
    needed = (
        sum(cache_bytes(each, max_model_len, generator.dtype, generator.tensor_parallel) for each in models) / 2**30
    )
    if 0 < generator.kv_cache_gib < needed:
        raise ConfigError(
            f"generator.kv_cache_gib = {generator.kv_cache_gib:g} cannot hold one rollout of {max_model_len} tokens, "
            f"which takes {needed:.3g}: raise it, or lower training.seq_len"
        )


def _check_vllm_mode(config: Config, *, on_cpu: bool) -> None:
    """Errors: ConfigError for vLLM's own batch-invariant mode, where engines cannot compute by it."""
    mode, is_ours = os.environ.get(_VLLM_MODE, "0"), config.titan.get("debug", {}).get("batch_invariant", False)
    if mode != "0" and (on_cpu or is_ours):
        why = "its products replace those of debug.batch_invariant = true" if is_ours else "it has no form for a CPU"
        mend = "unset it" if is_ours else "unset it, and set debug.batch_invariant = true for equal bits on both sides"
        raise ConfigError(f"{_VLLM_MODE}={mode} is set, which is vLLM's own batch-invariant mode: {why}; {mend}")


def check_generator_layout(hf: PreTrainedConfig, ranks: int, *, on_cpu: bool) -> None:
    """Check tensor parallelism of a generator; vLLM repeats KV heads below the rank count. Errors: ConfigError."""
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if heads % ranks:
        raise ConfigError(
            f"generator.tensor_parallel = {ranks} must divide the model's num_attention_heads = {heads}: "
            f"lower it, or use more replicas"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"generator.tensor_parallel = {ranks} and the model's num_key_value_heads = {kv_heads}: one must divide "
            f"the other; lower it, or use more replicas"
        )
    for name, size in _shared_by_ranks(hf).items():
        if size % ranks:
            raise ConfigError(
                f"generator.tensor_parallel = {ranks} must divide the model's {name}: lower it, or use more replicas"
            )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if on_cpu and head_dim not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"the model's head_dim = {head_dim} has no attention kernel in vLLM for CPUs: use a model with one of "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}"
        )


def _shared_by_ranks(hf: PreTrainedConfig) -> dict[str, int]:
    """Sizes of which each rank of an engine has an equal part, besides those of heads, by what they are."""
    padded = ceil(hf.vocab_size / _VOCABULARY_UNIT) * _VOCABULARY_UNIT
    sizes = {f"vocab_size = {hf.vocab_size}, padded to {padded}": padded}
    wide = getattr(hf, "intermediate_size", None)
    if wide and not any(getattr(hf, key, None) for key in _EXPERTS):
        sizes[f"intermediate_size = {wide}"] = wide
    return sizes


def _check_quantization(hf: PreTrainedConfig, generator: GeneratorConfig) -> None:
    """Errors: ConfigError for layers that are not multiplied in FP8 here, or blocks that ranks would cut."""
    setting = f"generator.quantization = {generator.quantization!r}"
    _check_layers(hf, setting)
    if generator.quantization != _PER_BLOCK or generator.tensor_parallel == 1:
        return
    ranks = generator.tensor_parallel
    for name, size in _block_sizes(hf, ranks).items():
        if size % (_BLOCK * ranks):
            raise ConfigError(
                f"{setting}: {name} = {size} over generator.tensor_parallel = {ranks} ranks are no whole blocks of "
                f"{_BLOCK}: take 'fp8_per_channel', or generator.replicas in place of ranks"
            )


def _check_layers(hf: PreTrainedConfig, setting: str) -> None:
    """Errors: ConfigError for layers that have no FP8 here."""
    if found := layers_without_fp8(hf):
        kind, key = found
        raise ConfigError(f"{setting}: {kind} ({key} in config.json) is not quantized here: leave it out")


def _block_sizes(hf: PreTrainedConfig, ranks: int) -> dict[str, int]:
    """Outputs of layers that an engine fuses, by what they are made of."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return {
        "num_attention_heads * head_dim": hf.num_attention_heads * head_dim,
        "num_key_value_heads * head_dim": max(hf.num_key_value_heads, ranks) * head_dim,
        "intermediate_size": hf.intermediate_size,
    }


def check_batch_invariant(config: Config, titan: TitanConfig, hf: PreTrainedConfig, family: Family | None) -> None:
    """Check that trainer and engines can have equal bits. ``config``: with the device's defaults. Errors:
    ConfigError."""
    setting = "debug.batch_invariant = true"
    if why := why_not_invariant(model_config(hf, family)):
        raise ConfigError(f"{setting}: the model ({hf.model_type}) has no batch-invariant form of {why}; leave it out")
    _check_degrees(titan.parallelism.tensor_parallel_degree, config.generator.tensor_parallel, setting)
    for key, value, wanted in _variant_settings(config, titan):
        if value != wanted:
            raise ConfigError(
                f"{setting} and {key} = {value!r}: trainer and engines would not have equal bits; set {key} = "
                f"{wanted!r}, or leave debug.batch_invariant out"
            )


def _check_degrees(trainer: int, engine: int, setting: str) -> None:
    """Errors: ConfigError for degrees of which one side's ranks could not add up as the other's do, by halves."""
    smaller, larger = sorted((trainer, engine))
    times, rest = divmod(larger, smaller)
    if smaller > 1 and (rest or times.bit_count() > 1):
        raise ConfigError(
            f"{setting}, parallelism.tensor_parallel_degree = {trainer} and generator.tensor_parallel = {engine}: sums "
            f"over ranks are taken by halves; make one a power of two times the other, or 1"
        )


def _variant_settings(config: Config, titan: TitanConfig) -> Iterator[tuple[str, object, object]]:
    """Key, value, and the only value that batch-invariant layers compute."""
    generator = config.generator
    yield "parallelism.context_parallel_degree", titan.parallelism.context_parallel_degree, 1
    yield "generator.dtype", generator.dtype, titan.training.mixed_precision_param
    yield "generator.quantization", generator.quantization, "none"
    yield "float8.recipe_name", titan.float8.recipe_name, "none"
    yield "generator.speculative.method", generator.speculative.method, "none"
    yield "lora.rank", config.lora.rank, 0
    yield "compile.enable", titan.compile.enable, False
    for key in PENALTIES:
        yield f"rollout.{key}", getattr(config.rollout, key), getattr(RolloutConfig, key)


def check_export(config: Config, algorithm: Algorithm, hf: PreTrainedConfig, *, on_cpu: bool) -> None:
    """Errors: ConfigError for a model that cannot be written in FP8, or not as engines have it."""
    settings = config.checkpoint
    if settings.export_quantization == "none":
        return
    setting = f"checkpoint.export_quantization = {settings.export_quantization!r}"
    if algorithm.head == "value":
        raise ConfigError(
            f"{setting}: algorithm.name = {config.algorithm.name!r} trains a model that no engine serves: leave it out"
        )
    if config.model.family:
        raise ConfigError(
            f"{setting}: which layers of model.family = {config.model.family!r} engines fuse is not known: leave it out"
        )
    _check_layers(hf, setting)
    sizes = _block_sizes(hf, 1) | {"hidden_size": hf.hidden_size} if settings.export_quantization == _PER_BLOCK else {}
    for name, size in sizes.items():
        if size % _BLOCK:
            raise ConfigError(
                f"{setting}: the model's {name} = {size} is no whole number of blocks of {_BLOCK}, which vLLM needs of "
                f"a file: take 'fp8_per_channel'"
            )
    if settings.export_dtype not in ("auto", dtype := generator_on(config.generator, on_cpu=on_cpu).dtype):
        raise ConfigError(
            f"{setting} and checkpoint.export_dtype = {settings.export_dtype!r}: what is not quantized is written in "
            f"the engines' dtype, generator.dtype = {dtype!r}: leave checkpoint.export_dtype out"
        )


def check_decoding(config: Config, algorithm: Algorithm, hf: PreTrainedConfig) -> None:
    """Errors: ConfigError for settings of which the trainer would not have the distribution, or that end nothing."""
    rollout, words = config.rollout, algorithm.needs.teacher_words
    penalties = changed(rollout, PENALTIES)
    if words and (keys := [*changed(rollout, CUTS), *penalties]):
        raise ConfigError(
            f"rollout.{keys[0]} = {getattr(rollout, keys[0])}: {config.algorithm.name!r} learns a teacher's {words} "
            f"likeliest words, of which sampling leaves some out or changes their logits: leave it out, or set "
            f"algorithm.top_k = 0"
        )
    if penalties and config.model.kernel == "triton":
        raise ConfigError(
            f"rollout.{penalties[0]} = {getattr(rollout, penalties[0])}: model.kernel = 'triton' has no penalties: "
            f"leave model.kernel out, or take 'reference'"
        )
    training, held_out = training_budget(config), held_out_budget(config)
    _check_reached(training, rollout.max_new_tokens)
    if not training.tokens and not config.eval.suites:  # whose answers may be longer
        _check_reached(held_out, rollout.max_new_tokens)
    _check_top_k(hf, "rollout.top_k", rollout.top_k)
    _check_speculation(config, hf)


def check_suite_decoding(suite: Suite, config: Config, hf: PreTrainedConfig, tokenizer: Tokenizer) -> None:
    """Errors: ConfigError for settings of a suite that the model cannot follow, or that have no effect."""
    _check_top_k(hf, f"{suite.setting}.top_k", suite.config.top_k)
    if config.data.file:  # of other runs it is checked with their own answers
        _check_speculation(config, hf)
    _check_drafts(config, suite.setting, suite.config)
    inherited, own = held_out_budget(config), suite.config.thinking_budget
    budget = inherited if own is None else ThinkingBudget(f"{suite.setting}.thinking_budget", own)
    if not budget.tokens:
        return
    if own is not None and not inherited.tokens:
        _check_reached(budget, suite.max_new_tokens(config.rollout.max_new_tokens))
    thinking = ThinkingCheck(budget, tokenizer)
    for prompt in suite.prompts:
        thinking.add(prompt, encode_checked(suite.task, tokenizer, prompt))
    if own is not None:
        thinking.check_effect()


def _check_speculation(config: Config, hf: PreTrainedConfig) -> None:
    """Errors: ConfigError for a model, or answers, whose drafts could not be checked."""
    settings = config.generator.speculative
    if settings.method == "none":
        return
    setting = f"generator.speculative.method = {settings.method!r}"
    if settings.has_model and not settings.model:
        raise ConfigError(
            f"{setting} needs a model: give its Hugging Face directory as generator.speculative.model, or as "
            f"drafter.path if it is to learn beside the policy"
        )
    if settings.method == "mtp":
        _check_prediction_layers(setting, config, hf)
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise ConfigError(
            f"generator.speculative.prompt_lookup_min = {settings.prompt_lookup_min} is more than prompt_lookup_max = "
            f"{settings.prompt_lookup_max}: raise that"
        )
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()):
        raise ConfigError(
            f"{setting}: the states of linear attention (layer_types) cannot go back over a draft; leave it out"
        )
    if config.algorithm.routing == "replay":
        raise ConfigError(
            f"{setting} and algorithm.routing = 'replay': experts are not recorded of drafts; leave one of them out"
        )
    _check_drafts(config, "rollout", config.rollout)
    if (budget := held_out_budget(config)).tokens:
        raise ConfigError(_without_drafts(config, budget.setting, budget.tokens))


def _check_prediction_layers(setting: str, config: Config, hf: PreTrainedConfig) -> None:
    """Errors: ConfigError for a policy without layers for multi-token prediction that engines here draft by."""
    if hf.model_type not in PREDICTION_LAYERS:
        raise ConfigError(
            f"{setting}: engines draft by the own layers of {', '.join(PREDICTION_LAYERS)} alone, and the policy "
            f"is of model type {hf.model_type!r}; take another method"
        )
    count, drafted = getattr(hf, "num_nextn_predict_layers", None), config.generator.speculative.num_speculative_tokens
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"{setting}: num_nextn_predict_layers = {count!r} in config.json is no number of layers for multi-token "
            f"prediction; take another method, or the base model's directory"
        )
    if drafted % count:
        raise ConfigError(
            f"generator.speculative.num_speculative_tokens = {drafted}: the policy drafts by {count} layers in turn "
            f"(num_nextn_predict_layers); give a multiple of {count}"
        )
    if not Path(config.model.path).is_dir():  # a plan may have the shape of a model alone
        return
    try:
        check_prediction_layers(spec_of(hf, ""), config.model.path)
    except ValueError as error:
        raise ConfigError(
            f"{setting}, model.path = {config.model.path!r}: its layers for multi-token prediction: {error}; take "
            f"another method, or the base model's directory"
        ) from None


def _check_drafts(config: Config, section: str, settings: RolloutConfig | SuiteConfig) -> None:
    """Errors: ConfigError for a setting of answers that drafts are not checked with."""
    keys = changed(settings, (*CUTS, *PENALTIES, "thinking_budget"))
    if keys and config.generator.speculative.method != "none":
        raise ConfigError(_without_drafts(config, f"{section}.{keys[0]}", getattr(settings, keys[0])))


def _without_drafts(config: Config, setting: str, value: float) -> str:
    method = config.generator.speculative.method
    return (
        f"generator.speculative.method = {method!r} and {setting} = {value}: drafts are not checked with it; leave one "
        f"of them out"
    )


def _check_reached(budget: ThinkingBudget, longest: int) -> None:
    """``longest``: tokens of an answer. Errors: ConfigError for a budget, where there would be none, beyond that."""
    if budget.tokens >= longest:
        raise ConfigError(
            f"{budget.setting} = {budget.tokens} has no effect: an answer has at most {longest} tokens; lower it, or "
            f"leave it out"
        )


def _check_top_k(hf: PreTrainedConfig, setting: str, top_k: int) -> None:
    """Errors: ConfigError for as many words as the model has, or more."""
    if hf.vocab_size <= top_k:
        raise ConfigError(f"{setting} = {top_k}: the model has {hf.vocab_size} tokens; give fewer, or 0 for all")


def kernel_notices(config: Config, *, on_cpu: bool) -> list[str]:
    """Lines about other arithmetic, or a slower one, than a run on this device would have without a setting."""
    fp8 = _fp8_notices(config, on_cpu=on_cpu) + _export_notices(config, on_cpu=on_cpu)
    return fp8 + _weighing_notices(config) + _penalty_notices(config, on_cpu=on_cpu) + _invariance_notices(config)


def _fp8_notices(config: Config, *, on_cpu: bool) -> list[str]:
    emulated, lines = "emulated on a CPU, which takes longer than none", []
    if config.has_generators and config.generator.is_quantized:
        by = emulated if on_cpu else "by vLLM's kernels"
        lines.append(
            f"generator.quantization = {config.generator.quantization!r}: rollouts and evaluation have E4M3 weights "
            f"and inputs in linear layers, {by}"
        )
    if (recipe := config.titan.get("float8", {}).get("recipe_name", "none")) != "none":
        by = emulated if on_cpu else "by torchao's kernels"
        lines.append(
            f"float8.recipe_name = {recipe!r}: models are trained with E4M3 weights and inputs in linear layers, {by}"
        )
    saved = "saved" if config.checkpoint.export_quantization == "none" else "kept in checkpoints"
    return [f"{line}; weights that are updated, sent and {saved} are not quantized" for line in lines]


def _export_notices(config: Config, *, on_cpu: bool) -> list[str]:
    """Whether engines have other weights than the file that the run leaves."""
    scheme, generator = config.checkpoint.export_quantization, config.generator
    setting = f"checkpoint.export_quantization = {scheme!r}"
    if scheme == "none" or not config.has_generators:
        return []
    if generator.quantization != scheme:
        return [
            f"{setting} and generator.quantization = {generator.quantization!r}: the model is rolled out and evaluated "
            f"with other weights than it is exported with; set both alike"
        ]
    if on_cpu and generator.tensor_parallel > 1 and scheme != _PER_BLOCK:
        return [
            f"{setting}: on a CPU each of generator.tensor_parallel = {generator.tensor_parallel} ranks has scales of "
            f"its own, and the file has those of whole layers"
        ]
    return []


def _weighing_notices(config: Config) -> list[str]:
    """Whether tokens are weighed, with FP8. ``config``: with the algorithm's defaults for it."""
    options, importance = config.algorithm.options, config.algorithm.options.get("importance", "none")
    if not config.uses_fp8 or config.data.file:
        return []
    if importance == "none":
        return [
            "algorithm.importance = 'none': tokens are not weighed by how much likelier the trainer finds them than "
            "the engine that sampled them; leave it and algorithm.decoupled out for truncated importance sampling"
        ]
    bound, high = options.get("importance_bound", "truncate"), options.get("importance_high", 2.0)
    return [
        f"algorithm.importance = {importance!r}, {bound} at {high:g} (decoupled = true): tokens are weighed by how "
        f"much likelier the trainer finds them than the engine, by default with FP8"
    ]


def _penalty_notices(config: Config, *, on_cpu: bool) -> list[str]:
    penalties = changed(config.rollout, PENALTIES)
    if on_cpu or not penalties or config.model.kernel != "auto" or config.data.file:
        return []
    key = f"rollout.{penalties[0]} = {getattr(config.rollout, penalties[0])}"
    return [f"{key}: the trainer computes log-probabilities by model.kernel = 'reference', which has penalties"]


def _invariance_notices(config: Config) -> list[str]:
    if not config.titan.get("debug", {}).get("batch_invariant"):
        return []
    return [
        "debug.batch_invariant = true: trainer and engines compute log-probabilities to the same bits, which takes "
        "about twice as long"
    ]


def _check_cpu_kernels(hf: PreTrainedConfig, dtype: str) -> None:
    """Errors: ConfigError for layers that vLLM 0.32 has no kernel for on a CPU."""
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()):
        _check_cpu_states(hf, dtype)
    for key, size in _CPU_LATENTS.items():
        if getattr(hf, "kv_lora_rank", None) is not None and getattr(hf, key) != size:
            raise ConfigError(
                f"the model's {key} = {getattr(hf, key)} has no latent attention in vLLM for CPUs, only {size}: use "
                f"another model, or a GPU"
            )


def _check_cpu_states(hf: PreTrainedConfig, dtype: str) -> None:
    if dtype != "bfloat16":
        raise ConfigError(
            f"generator.dtype = {dtype!r}: vLLM computes linear attention (layer_types) on a CPU in bfloat16 alone; "
            f"set generator.dtype = 'bfloat16'"
        )
    sizes = hf.linear_key_head_dim, hf.linear_value_head_dim
    if sizes not in _CPU_STATES:
        raise ConfigError(
            f"the model's linear_key_head_dim, linear_value_head_dim = {sizes} have no linear attention in vLLM for "
            f"CPUs, only {' and '.join(map(str, _CPU_STATES))}: use another model, or a GPU"
        )


def cache_bytes(hf: PreTrainedConfig, num_tokens: int, dtype: str, ranks: int, *, windows: bool = False) -> int:
    """Bytes of cache that a request of ``num_tokens`` takes on each rank: keys and values, or latents, and states.

    ``windows``: whether layers with a sliding window count, as if they kept all tokens; without, it is a lower bound.
    """
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    element, blocks = getattr(torch, dtype).itemsize, ceil(num_tokens / _BLOCK_TOKENS)
    layers = sum(kind == "full_attention" or (windows and kind != "linear_attention") for kind in kinds)
    of_tokens = layers * _token_width(hf, ranks) * element * _BLOCK_TOKENS * blocks
    states = kinds.count("linear_attention")
    return of_tokens + (states * _state_bytes(hf, element) // ranks if states else 0)


def _token_width(hf: PreTrainedConfig, ranks: int) -> int:
    """Numbers that a layer of attention keeps of a token."""
    if (latents := getattr(hf, "kv_lora_rank", None)) is not None:
        return latents + hf.qk_rope_head_dim
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return 2 * max(hf.num_key_value_heads // ranks, 1) * head_dim


def _state_bytes(hf: PreTrainedConfig, element: int) -> int:
    """Bytes that a layer of linear attention keeps of a request: a state in fp32, and inputs of the convolution."""
    keys, values = (getattr(hf, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    mixed = 2 * hf.linear_num_key_heads * keys + hf.linear_num_value_heads * values
    state = hf.linear_num_value_heads * keys * values
    return state * torch.float32.itemsize + mixed * (hf.linear_conv_kernel_dim - 1) * element
