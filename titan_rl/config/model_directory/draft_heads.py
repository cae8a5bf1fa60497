"""What drafts beside a policy's own layers: EAGLE-3 heads, as directories, and layers for multi-token prediction.

Of a head: what tells it from a model, and what it can be refused for. Layers are part of the policy's directory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.model_directory.config_checks import NoModelError, check_sizes, read_config
from titan_rl.config.model_directory.directory import read_object, stored_tensors
from titan_rl.config.model_directory.hub import fetch, is_hub_name
from titan_rl.config.model_directory.safetensors_files import StoredTensor
from titan_rl.config.model_directory.weight_checks import check_dtypes, check_finite

POLICIES = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types of which vLLM 0.32 gives hidden states to a head."""
NUM_STATES = 3
"""Hidden states that a head reads of each token."""
MAPPING, EMBEDDING = "d2t", "embed_tokens.weight"
TABLES = (MAPPING, "t2d")
"""Which of the policy's tokens a head of a smaller vocabulary can draft: differences of numbers, and flags."""
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYERS = "eagle_aux_hidden_state_layer_ids"
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json for the number of layers for multi-token prediction."""
_APART = "mtp."
"""Begin of their names where they are not numbered with the model's layers."""
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
SHARED_WEIGHTS = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of their embeddings and output heads, of which the policy's are taken."""
_MAKE = "`titan-rl model eagle3 DIR --model.path POLICY` makes one"
_GIVE = f"give the directory of a head that was trained for this policy; {_MAKE}"
_REQUIRED = {
    **dict.fromkeys(("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"), False),
    **{"use_aux_hidden_state": True, "num_aux_hidden_states": NUM_STATES, "logit_scale": 1.0},
}
"""The values of keys of which others make another head; a key that is left out is fine."""


def is_draft_head(architectures: Any) -> bool:
    """Whether ``architectures`` of a config.json are those of an EAGLE-3 head."""
    return isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)


def weights_of_head(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors that learn, of a head or of a draft model: neither tables of a vocabulary nor a head's embeddings."""
    return {name: tensor for name, tensor in tensors.items() if name not in (*TABLES, EMBEDDING)}


def layer_of(name: str) -> tuple[int, str] | None:
    """Number of the layer that a tensor is of, and its name within that."""
    match = _OF_LAYER.match(name)
    return (int(match[1]), name[match.end() :]) if match else None


def is_prediction_layer(name: str, numbers: range) -> bool:
    """Whether a tensor is part of a layer for multi-token prediction. ``numbers``: of those layers."""
    layer = layer_of(name)
    return name.startswith(_APART) or (layer is not None and layer[0] in numbers)


def prediction_layers(path: str | Path, first: int) -> range:
    """Numbers of a directory's layers for multi-token prediction, by its config.json. ``first``: of the first one."""
    config = read_object(Path(path) / "config.json")
    count = next((config[key] for key in COUNTS if key in config), None)
    return range(first, first + count if type(count) is int else first)


def weights_of_layers(path: str | Path) -> dict[str, StoredTensor]:
    """Tensors that learn, of the layers for multi-token prediction in a policy's directory."""
    numbers = prediction_layers(path, read_object(Path(path) / "config.json")["num_hidden_layers"])
    return {
        name: tensor
        for name, tensor in stored_tensors(path).items()
        if (layer := layer_of(name)) is not None and layer[0] in numbers and layer[1] not in SHARED_WEIGHTS
    }


def find_draft_head(path: str, *, own_family: bool = False) -> str:
    """A head's directory that was checked: ``path``, or the one that a name of the Hub was fetched into.

    ``own_family``: no matter. Errors: ValueError, in one line, for what is no head, or one of another kind."""
    if is_hub_name(path):
        path = _fetch(path)
    try:
        _check_config(config := read_head_config(Path(path)))
        tensors = stored_tensors(path)
        weights = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
        check_dtypes(weights)
        check_finite(weights)
        _check_fc(weights.get("fc.weight"), config)
        _check_mapping(tensors.get(MAPPING), config)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    return path


def read_head_config(path: Path) -> dict[str, Any]:
    """Errors: ValueError if the directory holds no config.json."""
    try:
        return read_config(path)
    except NoModelError as error:
        raise ValueError(f"{error.why}: {_GIVE}") from None


def _fetch(name: str) -> str:
    """Errors: ValueError, which says how a head is made: ``name`` may be meant as a directory's."""
    try:
        return fetch(name, lambda folder: _check_config(read_config(folder)))
    except ValueError as error:
        made = "" if _MAKE in str(error) else f"; {_MAKE}"
        raise ValueError(f"{error}{made}") from None


def _check_fc(fc: StoredTensor | None, config: dict[str, Any]) -> None:
    """Errors: ValueError for a head that reads other hidden states."""
    wanted = config["hidden_size"], NUM_STATES * (config.get("target_hidden_size") or config["hidden_size"])
    if fc is None or fc.shape != wanted:
        found = "is not there" if fc is None else f"in {fc.file.name} is {fc.shape}"
        raise ValueError(f"fc.weight {found}, and {wanted} reads {NUM_STATES} hidden states: {_GIVE}")


def _check_mapping(mapping: StoredTensor | None, config: dict[str, Any]) -> None:
    """vLLM writes to whatever tokens it names. Errors: ValueError unless each is one of the policy's, and another."""
    size, number = config["vocab_size"], config.get("draft_vocab_size") or config["vocab_size"]
    sizes = f"draft_vocab_size = {number!r} and vocab_size = {size} in config.json"
    if type(number) is not int or not 0 < number <= size:
        raise ValueError(f"{sizes}: a head drafts some of the policy's tokens, or all")
    if (mapping is None) != (number == size):
        raise ValueError(f"{sizes}, and there is {'no' if mapping is None else 'a'} {MAPPING}: a head of fewer has one")
    if mapping is None:
        return
    if mapping.dtype != "I64" or mapping.shape != (number,):
        raise ValueError(
            f"{MAPPING} in {mapping.file.name} is {mapping.dtype} {mapping.shape}, and I64 ({number},) fits"
        )
    import numpy as np

    tokens = np.arange(number) + np.fromfile(mapping.file, "<i8", number, offset=mapping.start)
    if tokens.min() < 0 or tokens.max() >= size or len(np.unique(tokens)) < number:
        raise ValueError(f"{MAPPING} in {mapping.file.name} names tokens that the policy has not, or one twice")


def _check_config(config: dict[str, Any]) -> None:
    if not is_draft_head(names := config.get("architectures")):
        raise ValueError(f"architectures = {names!r} in config.json is no EAGLE-3 head ({ARCHITECTURES[0]}): {_GIVE}")
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type = {config.get('model_type')!r} in config.json of an EAGLE-3 head must be 'llama'")
    check_sizes(config)
    if config["num_hidden_layers"] != 1:
        raise ValueError(f"num_hidden_layers = {config['num_hidden_layers']} in config.json: a head has one layer")
    for key, value in (*config.items(), *_eagle_config(config).items()):
        if value is not None and value != _REQUIRED.get(key, value):
            raise ValueError(f"{key} = {value!r} in config.json: heads of this kind are not run here; {_GIVE}")
    if (kinds := config.get("layer_types")) not in (None, [], ["full_attention"]):
        raise ValueError(f"layer_types = {kinds!r} in config.json: a head sees all tokens; {_GIVE}")
    if LAYERS in _eagle_config(config):  # vLLM's runner for GPUs does not look there
        raise ValueError(f"eagle_config.{LAYERS} in config.json: move it out of eagle_config, beside hidden_size")


def _eagle_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Errors: ValueError for one that is no table."""
    table = config.get("eagle_config") or {}
    if not isinstance(table, dict):
        raise ValueError(f"eagle_config = {table!r} in config.json must be an object: copy the head's own")
    return table


def layers_read(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a policy of ``num_layers`` whose inputs a head reads; 0: embeddings. ``config``: the head's.

    Errors: ValueError for layers that there are not."""
    chosen = config.get(LAYERS) or (2, num_layers // 2, num_layers - 3)
    is_list = isinstance(chosen, list | tuple) and all(type(layer) is int for layer in chosen)
    if not is_list or len(chosen) != NUM_STATES or list(chosen) != sorted({*chosen} & {*range(num_layers)}):
        raise ValueError(
            f"{LAYERS} = {chosen!r} in config.json, of a policy of {num_layers} layers: {NUM_STATES} of their numbers "
            f"in ascending order are wanted; {_GIVE}"
        )
    return tuple(chosen)
