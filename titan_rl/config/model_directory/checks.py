"""Checks of a model directory before torch is imported, in less than a second.

What only a built model tells is checked by ``models/weights/hf_weights.py``, and [parallelism] against the model by
``trainer/model/layout.py``: both before any process starts.
"""

from pathlib import Path

from titan_rl.config.model_directory.config_checks import (
    VISION,
    NoModelError,
    check_config,
    check_stop_tokens,
    read_config,
)
from titan_rl.config.model_directory.directory import stored_tensors
from titan_rl.config.model_directory.hub import fetch, is_hub_name
from titan_rl.config.model_directory.tensor_names import expected_tensors, is_tied
from titan_rl.config.model_directory.tokenizer_checks import check_tokenizer
from titan_rl.config.model_directory.vision_checks import check_image_form
from titan_rl.config.model_directory.weight_checks import (
    check_dtypes,
    check_finite,
    check_names,
    check_value_names,
    check_writes,
)


def find_model(path: str, *, own_family: bool = False, is_chat: bool = False) -> str:
    """A directory that was checked: ``path``, or the one that a name of the Hub was fetched into.

    ``own_family``: the run has a ``model.family``, whose sizes and names are not known here. ``is_chat``: a chat
    template is needed. Errors: ValueError, in one line, for what keeps the model from being trained as it is.
    """
    if is_hub_name(path):
        path = fetch(path, lambda folder: check_config(read_config(folder), own_family=own_family))
    try:
        check_directory(Path(path), own_family=own_family, is_chat=is_chat)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    return path


_TRAIN_ONE = (
    "train a reward model (algorithm.name = 'reward_model', with a language model as model.path), and give that run's "
    "model directory"
)


def check_reward_model(path: Path) -> None:
    """Of any type that transformers has. Errors: ValueError for what gives no score of a text."""
    try:
        config, tensors = read_config(path), stored_tensors(path)
        heads = [tensor for name, tensor in tensors.items() if name.rpartition(".")[0].split(".")[-1] == "score"]
        if not heads:
            what = "a language model" if "CausalLM" in str(config.get("architectures")) else "a model"
            raise ValueError(f"it is {what} without score.weight, which says no reward: {_TRAIN_ONE}")
        if heads[0].shape[0] != 1:
            raise ValueError(f"it has {heads[0].shape[0]} labels, and a reward model has one: {_TRAIN_ONE}")
        check_finite(tensors)
    except NoModelError as error:
        raise ValueError(f"{error.why}: {_TRAIN_ONE}") from None
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def find_value_model(path: str, *, own_family: bool = False) -> str:
    """``find_model`` for one that is to have a value head; its tokenizer is not used. Errors: ValueError."""
    if is_hub_name(path):
        path = fetch(path, lambda folder: check_config(read_config(folder), own_family=own_family, any_head=True))
    try:
        config, tensors = read_config(Path(path)), stored_tensors(path)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    check_config(config, own_family=own_family, any_head=True)
    check_dtypes(tensors)
    if not own_family and (expected := expected_tensors(config)) is not None:
        check_value_names(tensors, expected)
    check_finite(tensors)
    return path


def check_directory(path: Path, *, own_family: bool, is_chat: bool) -> None:
    """The quick checks first. Errors: ValueError; OSError for what cannot be read."""
    config = read_config(path)
    check_config(config, own_family=own_family)
    check_stop_tokens(path, config)
    check_tokenizer(path, config.get("vocab_size"), is_chat=is_chat)
    if not own_family and config["model_type"] in VISION:
        check_image_form(path, config)
    tensors = stored_tensors(path)
    check_dtypes(tensors)
    if not own_family and (expected := expected_tensors(config)) is not None:
        check_writes(tensors)
        check_names(tensors, expected, is_tied=is_tied(config))
    check_finite(tensors)
