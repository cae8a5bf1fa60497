"""What a config.json can be refused for, as far as it needs no torch: ``models/`` tells the rest."""

from collections.abc import Iterator
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from titan_rl.config.model_directory.directory import check_files, how_to_make, read_object, stop_token_ids
from titan_rl.config.model_directory.tensor_names import LAYERS, head_size, num_experts

VISION = ("qwen2_5_vl",)
"""Model types that see images."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": (),
}
"""Scalings of rotary embeddings whose frequencies do not change at run time, and the numbers that each needs."""
_SIZES = (
    "target_hidden_size",
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *(
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    ),
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NUMBERS = ("rms_norm_eps", "rope_theta")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob")
_BIASES = ("attention_bias", "mlp_bias")
HAVE_BIASES = ("glm4", "glm4_moe", "gpt_oss")
"""Model types that may say so of themselves; Qwen2's have biases that no key tells of."""
_GIVE = (
    "give a Hugging Face directory, which begins with a config.json (`titan-rl model smollm2 DIR` makes one), or the "
    "name of a model on the Hub"
)
_DTYPES = (None, "auto", "float32", "bfloat16", "float16")


class NoModelError(ValueError):
    """Path without a model. ``why``: the message without its mend, which depends on the setting."""

    def __init__(self, why: str):
        super().__init__(f"{why}: {_GIVE}")
        self.why = why


def read_config(path: Path) -> dict[str, Any]:
    """Errors: ValueError if the directory holds none."""
    if not path.exists() and (mend := how_to_make(path)):
        raise ValueError(mend)
    if not path.is_dir():
        raise NoModelError("it is a file" if path.exists() else "there is no such directory")
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ValueError("it is an adapter (LoRA): merge it into its model first (`merge_and_unload` of peft does)")
    if not (path / "config.json").exists():
        if model := model_of_run(path):
            raise ValueError(f"it holds no config.json: {model}")
        raise NoModelError("it holds no config.json")
    check_files(path)
    config = read_object(path / "config.json")
    if not config.get("model_type") and is_run_config(config):
        raise ValueError(f"it is a run directory: {model_of_run(path)}")
    _check_magnitudes(config)
    return with_text_sizes(config) if config.get("model_type") in VISION else config


def with_text_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a vision model with the sizes of its language model, wherever it has them.

    Errors: ValueError for a table that is none."""
    text = config.get("text_config") or {}
    if not isinstance(text, dict) or not isinstance(config.get("vision_config"), dict):
        raise ValueError("text_config and vision_config in config.json must be objects: copy the model's own")
    return text | config


_OF_RUNS = ("run", "training", "algorithm", "checkpoint")
"""Sections that the config.json of every run directory has."""


def is_run_config(config: Any) -> bool:
    """Whether a config.json is the one of a run directory."""
    return isinstance(config, dict) and all(isinstance(config.get(section), dict) for section in _OF_RUNS)


def model_of_run(path: Path) -> str:
    """What to give in place of a run directory, or of a folder in one; empty for any other."""
    for folder in (path, *list(path.absolute().parents)[:2]):
        if not (folder / "config.json").is_file():
            continue
        with suppress(ValueError, OSError):
            if is_run_config(read_object(folder / "config.json")):
                return _its_model(folder)
    return ""


def recorded_task(model: Path) -> str:
    """Name of the task of the run that a model directory lies in; empty if it lies in none."""
    with suppress(ValueError, OSError):
        config = read_object(model.absolute().parent / "config.json")
        if is_run_config(config) and isinstance(config.get("task"), dict):
            return str(config["task"].get("name", ""))
    return ""


def _its_model(run: Path) -> str:
    if (run / "model" / "config.json").is_file():
        others = [str(run / name) for name in ("drafter", "critic") if (run / name / "config.json").is_file()]
        return " or ".join([f"give the model that the run wrote, {run / 'model'}", *others])
    return f"the run has written no model yet, which will be {run / 'model'}: let it end (--resume goes on with it)"


_MOST = (
    (("layers", "layer", "experts", "depth"), 10_000),
    (("_size", "_dim", "_heads", "_rank"), 1 << 27),
    (("_embeddings", "_window", "_positions"), 1 << 48),
)
"""Ends of keys, whatever the model's type, and the largest number that such a key may have: a model is built of as many
parts before its weights are looked at."""
_MOST_EXPERTS = 1_000_000
_LARGEST = 1 << 128


def _check_magnitudes(config: dict[str, Any]) -> None:
    """Errors: ValueError for a number that no model has, in config.json or in a table of it."""
    tables = [config]
    while tables:
        table = tables.pop()
        tables += [value for value in table.values() if isinstance(value, dict)]
        for key, value in table.items():
            most = next((most for ends, most in _MOST if key.endswith(ends)), _LARGEST)
            if isinstance(value, int) and abs(value) > most:
                raise ValueError(f"{key} in config.json is {_written(value)}, and at most {most:,} is taken: mend it")
        counts = [table.get(name) for name in ("num_hidden_layers", "num_experts", "num_local_experts")]
        layers, *experts = [value if isinstance(value, int) else 1 for value in counts]
        if layers * max(experts) > _MOST_EXPERTS:
            raise ValueError(f"config.json has {layers:,} layers of {max(experts):,} experts: mend it")


def _written(value: int) -> str:
    """Python does not write out whole numbers of thousands of digits."""
    return f"{value:,}" if abs(value) < 10**18 else f"a number of {value.bit_length()} bits"


def check_config(config: dict[str, Any], *, own_family: bool, any_head: bool = False) -> None:
    """``own_family``: the run has a ``model.family``, which reads the sizes as it likes. ``any_head``: the model need
    not be one that gives next tokens. Errors: ValueError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"model_type = {model_type!r} in config.json: give the name of the model's type")
    check_plain_weights(config)
    if not own_family:
        if model_type == "qwen3_5":
            raise ValueError(
                "model type 'qwen3_5' sees images, too: save its text part, which is trained here, and its tokenizer "
                "by transformers (`Qwen3_5ForCausalLM.from_pretrained(path).save_pretrained(out, "
                "save_original_format=False); AutoTokenizer.from_pretrained(path).save_pretrained(out)`)"
            )
        if model_type not in LAYERS:
            raise ValueError(
                f"model type {model_type!r} is not supported: use one of {', '.join(LAYERS)}, or give a family of your "
                f"own as model.family"
            )
        if not any_head and model_type not in VISION:
            _check_architectures(config.get("architectures"))
        check_sizes(config)
        _check_biases(config)


def check_sizes(config: dict[str, Any]) -> None:
    """Errors: ValueError for sizes, numbers and rotary embeddings that cannot be."""
    _check_values(config)
    _check_heads(config)
    for rope in _ropes(config):
        _check_rope(rope)


def check_plain_weights(config: dict[str, Any]) -> None:
    """Errors: ValueError for quantized weights, and for dtypes that are not trained in."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method") if isinstance(config[key], dict) else config[key]
            how = ", quantization_config=Mxfp4Config(dequantize=True)" if method == "mxfp4" else ""
            ours = f"; {_EXPORTED}" if method in ("fp8", "compressed-tensors") else ""
            raise ValueError(
                f"{key} in config.json ({method}): quantized weights are not read here; {_PLAIN} (transformers "
                f"dequantizes: `from_pretrained(path, dtype='bfloat16'{how})`, then `save_pretrained`){ours}"
            )
    for key in ("dtype", "torch_dtype"):
        if config.get(key) not in _DTYPES:
            raise ValueError(f"{key} = {config[key]!r} in config.json: {_PLAIN}")


_EXPORTED = (
    "if checkpoint.export_quantization wrote it, go on with that run, which with --resume "
    "--checkpoint.export_quantization=none also writes it in full"
)
_PLAIN = "take the model in bfloat16, float16 or float32"


CLASSIFIER = (
    "it is a model for sequence classification, which writes no words: give the language model that it was made of, or "
    "this one as reward_model.path or critic.path"
)


def _check_architectures(names: Any) -> None:
    """vLLM chooses what it builds by these. Errors: ValueError for a model that gives no next token."""
    if isinstance(names, list) and any("Eagle" in str(name) for name in names):
        raise ValueError(
            f"architectures = {names!r} in config.json: it is a draft head, which writes no words by itself: set "
            f"generator.speculative.method = 'eagle3', and give it as generator.speculative.model or drafter.path"
        )
    if isinstance(names, list) and any("SequenceClassification" in str(name) for name in names):
        raise ValueError(f"architectures = {names!r} in config.json: {CLASSIFIER}")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and "CausalLM" in n for n in names):
        raise ValueError(
            f"architectures = {names!r} in config.json: it must name a model for generation, such as LlamaForCausalLM"
        )


def _check_values(config: dict[str, Any]) -> None:
    for name in _NEEDED:
        if config.get(name) is None:
            raise ValueError(f"config.json has no {name}: copy the model's own")
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} = {value!r} in config.json must be a whole number of at least 1")
    for name in _NUMBERS:
        if config.get(name) is not None:
            _check_number(name, config[name])
    for name in _FLAGS:
        if not isinstance(config.get(name, False), bool):
            raise ValueError(f"{name} = {config[name]!r} in config.json must be true or false")


def _check_number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not isfinite(value) or value <= 0:
        raise ValueError(f"{name} = {value!r} in config.json must be a number above 0")


def _check_biases(config: dict[str, Any]) -> None:
    model_type = config["model_type"]
    key = next((key for key in _BIASES if config.get(key) and model_type not in HAVE_BIASES), None)
    if key is not None:
        raise ValueError(
            f"{key} = true in config.json: models of type {model_type!r} with biases are not supported, only those "
            f"without; give one of these ({' and '.join(_BIASES)} false or left out), or a family of your own as "
            f"model.family"
        )


def _check_heads(config: dict[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} in config.json is no multiple of num_key_value_heads = {kv_heads}"
        )
    if hidden % heads and (config["model_type"] == "llama" or not config.get("head_dim")):
        raise ValueError(f"hidden_size = {hidden} in config.json is no multiple of num_attention_heads = {heads}")
    if head_size(config) % 2:
        raise ValueError(f"head_dim = {head_size(config)} in config.json is odd, and rotary embeddings turn pairs")
    chosen, experts = config.get("num_experts_per_tok"), num_experts(config)
    if chosen and experts and chosen > experts:
        raise ValueError(f"num_experts_per_tok = {chosen} in config.json is more than num_experts = {experts}")


def _ropes(config: dict[str, Any]) -> Iterator[Any]:
    """The rotary embeddings: one, or one for each type of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        parameters = config.get(key)
        if (
            isinstance(parameters, dict)
            and parameters
            and all(isinstance(value, dict) for value in parameters.values())
        ):
            yield from parameters.values()
        elif parameters is not None:
            yield parameters


def _check_rope(rope: Any) -> None:
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling = {rope!r} in config.json must be an object, or be left out")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if "mrope_section" in rope and rope_type == "mrope":
        rope_type = "default"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} in config.json is not supported, only {', '.join(ROPE_TYPES)}")
    for name in ROPE_TYPES[rope_type]:
        _check_number(f"{name} of rope type {rope_type!r}", rope.get(name))
    if "rope_theta" in rope:
        _check_number("rope_theta", rope["rope_theta"])


def check_stop_tokens(path: Path, config: dict[str, Any]) -> None:
    """Errors: ValueError if no token ends an answer, or one is no token of the model's."""
    ids, size = stop_token_ids(path), config.get("vocab_size")
    if not ids:
        raise ValueError("no eos_token_id in config.json or generation_config.json: no answer could end; add the id")
    if isinstance(size, int) and ids[-1] >= size:
        raise ValueError(
            f"eos_token_id = {ids[-1]}, and vocab_size = {size} in config.json: no answer could end; mend it"
        )
