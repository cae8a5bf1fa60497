"""Adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors.

``peft.PeftModel.from_pretrained(model, directory)`` loads what is written here. Read is what this tree can compute:
plain LoRA of one rank, on the projections and at the scale that the configuration names.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from titan_rl.config.model_directory.config_checks import VISION
from titan_rl.config.model_directory.directory import read_object
from titan_rl.config.model_directory.safetensors_files import read_header
from titan_rl.config.sections.schema import LoraConfig
from titan_rl.data.storage.files import replacing
from titan_rl.models.weights.hf_weights import slices
from titan_rl.models.weights.shards import Shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MODEL = "model."
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_bias": False,
    "modules_to_save": None,
    "alpha_pattern": {},
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
"""PEFT's keys with the one value that is computed here; a key that is left out there is fine."""


@dataclass(frozen=True)
class AdapterForm:
    """How a model type's adapters are written, since PEFT names layers as transformers builds them."""

    model: str = _MODEL
    """Where transformers has the language model, which a checkpoint has as ``model.``."""
    excluded: str | None = None
    """Of modules that have a target's name without an adapter: a pattern of their names."""

    def name(self, name: str) -> str:
        """A tensor's name in the file, by that in the model."""
        return _PREFIX + (self.model + name.removeprefix(_MODEL) if name.startswith(_MODEL) else name)


def form_of(model_type: str) -> AdapterForm:
    """By config.json's model type."""
    return AdapterForm("model.language_model.", r".*\bvisual\..*") if model_type in VISION else AdapterForm()


def save_adapter(tensors: dict[str, torch.Tensor], lora: LoraConfig, base: Path, out: Path, form: AdapterForm) -> None:
    """Write adapters in PEFT's format.

    ``tensors``: by name in the model, such as ``model.layers.0.self_attn.q_proj.lora_A.weight``."""
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "init_lora_weights": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
    }
    if form.excluded is not None:
        config["exclude_modules"] = form.excluded
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / WEIGHTS) as beside:
        save_file({form.name(name): tensor.contiguous() for name, tensor in tensors.items()}, beside, {"format": "pt"})
    with replacing(out / CONFIG) as beside:
        beside.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_adapter(
    path: Path, lora: LoraConfig, targets: list[str], shapes: dict[str, tuple[int, ...]], form: AdapterForm
) -> None:
    """Check that a directory holds exactly the model's adapters, with its settings.

    ``targets``, ``shapes``: of the model's adapters, by Hugging Face's names. Errors: ValueError."""
    if not (path / CONFIG).exists() and (path / "adapter" / CONFIG).is_file():
        raise ValueError(f"it holds no {CONFIG}: give the adapter that the run wrote, {path / 'adapter'}")
    config = read_object(path / CONFIG)
    for key, expected in _PLAIN.items():
        if (value := config.get(key, expected)) != expected and (value or expected):
            raise ValueError(f"{CONFIG} has {key} = {value!r:.60}, and only {expected!r} is computed here")
    for setting, peft_key, expected in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(peft_key) != expected:
            raise ValueError(f"{CONFIG} has {peft_key} = {config.get(peft_key)!r:.60}: set lora.{setting} to that")
    value = config.get("target_modules")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{CONFIG} has target_modules = {value!r:.60}: give a list of names")
    if set(value) != set(targets):
        raise ValueError(f"{CONFIG} has target_modules = {sorted(value)}: set lora.targets to that")
    _check_tensors(path, {form.name(name): shape for name, shape in shapes.items()})


def _check_tensors(path: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """``expected``: shapes by the file's names."""
    stored = {name: tensor.shape for name, tensor in read_header(path / WEIGHTS).items()}
    for name in sorted(stored.keys() ^ expected.keys()):
        raise ValueError(f"{WEIGHTS} {'has' if name in stored else 'lacks'} {name}: it is another model's")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ValueError(f"{name} is {stored[name]} in {WEIGHTS}, and should be {shape}")


@torch.no_grad()
def load_adapter(shards: list[Shard], path: str | Path, form: AdapterForm) -> None:
    """Fill a rank's boxes of adapters, reading only those parts. Errors: ValueError for NaN or infinities."""
    with safe_open(Path(path) / WEIGHTS, "pt") as tensors:
        for shard in shards:
            values = tensors.get_slice(form.name(shard.name))[slices(shard.start, shard.tensor.shape)]
            if not values.isfinite().all():
                raise ValueError(f"{shard.name} in {path} holds NaN or infinities: copy the file again")
            shard.tensor.copy_(values)
