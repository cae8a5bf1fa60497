"""Layers for multi-token prediction, behind a model's own: transformers leaves them out, and vLLM may draft by them."""

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.model_directory.directory import stored_tensors
from titan_rl.config.model_directory.draft_heads import SHARED_WEIGHTS, is_prediction_layer, layer_of, prediction_layers
from titan_rl.config.model_directory.weight_checks import check_names
from titan_rl.models.weights.shards import decoder_of, expected_shapes


def numbers_of(spec: ModelSpec, path: str | Path) -> range:
    """Numbers of these layers in a directory."""
    return prediction_layers(path, len(decoder_of(spec).layers))


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
    stored = {name: each for name, each in stored_tensors(path).items() if is_prediction_layer(name, numbers)}
    expected = {f"model.layers.{number}.{name}": shape for number in numbers for name, shape in of_layer.items()}
    expected |= {name: words for name in stored if (layer := layer_of(name)) is not None and layer[1] in SHARED_WEIGHTS}
    check_names(stored, expected, is_tied=False)
