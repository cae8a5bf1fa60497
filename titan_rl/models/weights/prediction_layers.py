"""Layers for multi-token prediction, behind a model's own: transformers leaves them out, and vLLM may draft by them."""

import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.model_directory.directory import read_object, stored_tensors
from titan_rl.config.model_directory.weight_checks import check_names
from titan_rl.models.weights.shards import decoder_of, expected_shapes

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json for their number."""
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_APART = "mtp."
"""Begin of their names where they are not numbered with the model's layers."""


def is_prediction_layer(name: str, numbers: range) -> bool:
    """Whether a tensor is part of such a layer. ``numbers``: of those layers."""
    layer = _OF_LAYER.match(name)
    return name.startswith(_APART) or (layer is not None and int(layer[1]) in numbers)


def numbers_of(spec: ModelSpec, path: str | Path) -> range:
    """Numbers of these layers in a directory, by its config.json."""
    config, first = read_object(Path(path) / "config.json"), len(decoder_of(spec).layers)
    count = next((config[key] for key in COUNTS if key in config), None)
    return range(first, first + count if type(count) is int else first)


def read_prediction_layers(spec: ModelSpec, path: str | Path) -> dict[str, torch.Tensor]:
    """A directory's layers, as they are: they are not trained, and written again."""
    numbers, by_file, layers = numbers_of(spec, path), defaultdict(list), {}
    for name, stored in stored_tensors(path).items():
        if is_prediction_layer(name, numbers):
            by_file[stored.file].append(name)
    for file, names in by_file.items():
        with safe_open(file, "pt") as tensors:
            layers |= {name: tensors.get_tensor(name) for name in names}
    return layers


def check_prediction_layers(spec: ModelSpec, path: str | Path) -> None:
    """Check that each layer holds what vLLM drafts by, which leaves unfilled what it does not find.

    A layer is one more like the model's last, behind what joins a hidden state and an embedding (DeepSeek-V3, arXiv
    2412.19437, section 2.2); embeddings and output head may be there, too, though the policy's are taken. Errors:
    ValueError."""
    decoder, numbers, shapes = decoder_of(spec), numbers_of(spec, path), expected_shapes(spec)
    width, last, words = decoder.dim, f"model.layers.{len(decoder.layers) - 1}.", (decoder.vocab_size, decoder.dim)
    of_layer = {name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
    of_layer |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (width,))
    of_layer |= {"eh_proj.weight": (width, 2 * width)}
    of_policy = dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), words)
    stored = {name: each for name, each in stored_tensors(path).items() if is_prediction_layer(name, numbers)}
    expected = {f"model.layers.{number}.{name}": shape for number in numbers for name, shape in of_layer.items()}
    expected |= {name: of_policy[rest] for name in stored if (rest := _OF_LAYER.sub("", name)) in of_policy}
    check_names(stored, expected, is_tied=False)
