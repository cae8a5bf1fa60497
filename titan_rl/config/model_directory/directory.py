"""Reader of a model directory: config.json, the index, and the files that it names.

The weights are what ``model.safetensors.index.json`` names, or the one safetensors file if there is no index.
"""

import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import JSON_BYTES, TOKENIZER_BYTES, RefusedFile, check_file, each_once, read_json
from titan_rl.config.model_directory.safetensors_files import StoredTensor, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OTHER_FORMATS = "consolidated*.safetensors"
"""The same weights under the names of their authors' own code, which some directories of the Hub hold besides."""
BELONGS = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "license*", "notice*", "use_policy*"),
    "additional_chat_templates/*.jinja",
)
_SMALL = {".json": JSON_BYTES, ".jinja": 1 << 20}
"""Bytes of files that are read as Python objects, or compiled; tokenizers' own libraries read the others."""
_OF_TOKENIZERS = ("tokenizer.json", "vocab.json")
_LEFT_BEHIND = ("*.index.json", "trainer_state.json", "*_results.json", "params.json", "adapter_config.json")
"""What describes other files of weights, or a training."""


def how_to_make(path: str | Path) -> str:
    """What is told of a directory that is not there and that a command makes; empty for another."""
    is_made = Path(path).name == "smollm2"
    return f"there is no such directory: `titan-rl model smollm2 {shlex.quote(str(path))}` makes it" if is_made else ""


def read_object(file: Path) -> dict[str, Any]:
    """Errors: ValueError if there is no such file, or it holds no JSON object."""
    try:
        value = read_json(file)
    except RefusedFile:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {file.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} holds no JSON object, but a value of type {type(value).__name__}")
    return value


def check_files(path: Path) -> None:
    """Before a library opens what it finds in a directory: all that may belong to a model is plain files of bounded
    sizes. Errors: ValueError."""
    for file in sorted((*path.glob("*"), *path.glob("additional_chat_templates/*"))):
        name = file.relative_to(path).as_posix().lower()
        is_weights = name.endswith((".safetensors", ".bin", ".gguf"))
        is_read = is_weights or any(fnmatch(name, pattern) for pattern in BELONGS)
        if not is_read or file.is_dir() or not file.exists():
            continue
        most = TOKENIZER_BYTES if name in _OF_TOKENIZERS else _SMALL.get(file.suffix.lower(), TOKENIZER_BYTES)
        try:
            check_file(file, None if is_weights else most)
        except OSError as error:
            raise ValueError(f"cannot read {file.name}: {error.strerror}") from None


def stop_token_ids(path: str | Path) -> list[int]:
    """Ids that end an answer: the union of what the model's JSON files call ``eos_token_id``. Errors: ValueError."""
    ids: set[int] = set()
    for file in (Path(path) / name for name in ("generation_config.json", "config.json")):
        value = read_object(file).get("eos_token_id") if file.is_file() else None
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and number >= 0 for number in values):
            raise ValueError(f"eos_token_id = {value!r} in {file.name}: give the id of a token, or a list of them")
        ids |= set(values)
    return sorted(ids)


def weight_files(path: str | Path) -> list[Path]:
    """The files that hold the weights, read or not. Errors: ValueError if there are none, or it is not clear which."""
    path = Path(path)
    if (path / INDEX).exists():
        return _indexed_files(path)
    candidates = sorted(path.glob("*.safetensors"))
    files = [file for file in candidates if not fnmatch(file.name, _OTHER_FORMATS)] or candidates
    if not files:
        raise ValueError(_why_none(path))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ValueError(
            f"{len(files)} safetensors files and no {INDEX} that says which of them count ({names}): move away what "
            f"does not belong to the model, or add its index"
        )
    return files


def _why_none(path: Path) -> str:
    hints = {
        "*.bin": "its weights are pickles, which are not read: convert them (`save_pretrained` of transformers does)",
        "*.gguf": "its weights are a GGUF file: convert it (`save_pretrained` of transformers does)",
    }
    hint = next((hint for pattern, hint in hints.items() if any(path.glob(pattern))), "give a Hugging Face directory")
    return f"it holds no *.safetensors: {hint}"


def weight_map(path: Path) -> dict[str, str]:
    """Tensor to file name, as the index says. Errors: ValueError."""
    try:
        index = read_json(path / INDEX, pairs=each_once)
    except RefusedFile:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {INDEX}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{INDEX} cannot be read: {error}") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX} has no weight_map from tensors to files")
    for name in dict.fromkeys(names.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {name!r}, which is no safetensors file of this directory")
    return names


def _indexed_files(path: Path) -> list[Path]:
    files = sorted({path / name for name in weight_map(path).values()})
    for file in files:
        if not file.is_file():
            raise ValueError(f"{INDEX} names {file.name}, and there is no such file: copy it, or the right index")
    if (path / SINGLE).exists() and path / SINGLE not in files:  # which transformers would read
        raise ValueError(f"it holds {SINGLE}, and {INDEX} that names other files: remove one of the two")
    return files


def stored_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of the model by name, from the headers of its files. Errors: ValueError if index and files disagree
    about a tensor, or a file is damaged."""
    path, tensors = Path(path), {}
    for file in weight_files(path):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ValueError(f"{name} is in {tensors[name].file.name} and in {file.name}: remove one of them")
            tensors[name] = tensor
    if (path / INDEX).exists():
        _check_index(weight_map(path), tensors)
    return tensors


def _check_index(names: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{INDEX} says that {name} is in {file}, and it is not: copy file and index again")
    if unnamed := sorted(set(tensors) - set(names)):
        name, file = unnamed[0], tensors[unnamed[0]].file.name
        raise ValueError(f"{file} holds {name}, which {INDEX} does not name: copy file and index again")


def belonging_files(path: Path) -> list[Path]:
    """What belongs to a model besides its weights, relative to its directory: configuration, tokenizer, templates,
    license, code. Neither other formats of the weights nor what a training left."""
    inside = [file.relative_to(path) for file in (*path.iterdir(), *path.glob("*/*")) if file.is_file()]
    return sorted(file for file in inside if _belongs(file.as_posix().lower()))


def _belongs(name: str) -> bool:
    # fnmatch's * would match a slash too
    alike = [pattern for pattern in BELONGS if pattern.count("/") == name.count("/")]
    return any(fnmatch(name, p) for p in alike) and not any(fnmatch(name, p) for p in _LEFT_BEHIND)
