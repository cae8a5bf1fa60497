"""Wrong model directories, each the tiny model with one defect, and words of its refusal."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from titan_rl.config.model_directory.directory import INDEX, SINGLE
from titan_rl.config.model_directory.safetensors_files import read_header

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""dtype, shape and bytes by name."""
_EMBEDDING, _UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
_FIRST, _SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True)
class WrongModel:
    """Defect of a model directory.

    ``spoil`` makes a good directory wrong; ``words`` are in the line that refuses it.
    """

    name: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    """Further ones of the command line."""
    is_untied: bool = False
    """Whether the good directory has an output head of its own."""


def read_tensors(file: Path) -> Tensors:
    content = file.read_bytes()
    return {n: (t.dtype, t.shape, content[t.start : t.stop]) for n, t in read_header(file).items()}


def write_tensors(file: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(values)]}
    write_raw(file, header, b"".join(values for _, _, values in tensors.values()))


def write_raw(file: Path, header: Any, values: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)


def shard(path: Path) -> None:
    """The one file of weights becomes two and an index."""
    tensors = read_tensors(path / SINGLE)
    names = sorted(tensors)
    parts = {_FIRST: names[: len(names) // 2], _SECOND: names[len(names) // 2 :]}
    for file, part in parts.items():
        write_tensors(path / file, {name: tensors[name] for name in part})
    (path / SINGLE).unlink()
    write_index(path, {name: file for file, part in parts.items() for name in part})


def write_index(path: Path, weight_map: Any) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Keys of a JSON file set, or removed where they are None."""

    def spoil(path: Path) -> None:
        table = json.loads((path / file).read_text()) | changes
        (path / file).write_text(json.dumps({key: value for key, value in table.items() if value is not None}))

    return spoil


def _config(**changes: Any) -> Callable[[Path], None]:
    return _json("config.json", **changes)


def _both(*spoils: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        for each in spoils:
            each(path)

    return spoil


def _text(file: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda path: (path / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def _without(*files: str) -> Callable[[Path], None]:
    return _both(*(lambda path, file=file: (path / file).unlink() for file in files))


def _renamed(file: str, new: str) -> Callable[[Path], object]:
    return lambda path: (path / file).rename(path / new)


def _copied(file: str, new: str) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(path / file, path / new)


def _nowhere(path: Path) -> None:
    shutil.rmtree(path)


def _file_instead(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("weights")


def _unreadable_config(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")


def _in_place(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        tensors = read_tensors(path / SINGLE)
        change(tensors)
        write_tensors(path / SINGLE, tensors)

    return spoil


def _as_dtype(dtype: str, item_bytes: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        _, shape, _ = tensors[_UP]
        tensors[_UP] = dtype, shape, bytes(prod(shape) * item_bytes)

    return change


def _with_value(bits: bytes, dtype: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        _, shape, _ = tensors[_UP]
        tensors[_UP] = dtype, shape, bytes(prod(shape) * len(bits) - len(bits)) + bits

    return change


def _cut(tensors: Tensors) -> None:
    dtype, (rows, columns), values = tensors[_UP]
    tensors[_UP] = dtype, (rows - 1, columns), values[: -columns * 4]


def _other_head(tensors: Tensors) -> None:
    dtype, shape, values = tensors[_EMBEDDING]
    tensors["lm_head.weight"] = dtype, shape, values[::-1]


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The header changed, the bytes as they were."""

    def spoil(path: Path) -> None:
        content = (path / SINGLE).read_bytes()
        [length] = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        write_raw(path / SINGLE, header, content[8 + length :])

    return spoil


def _index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        shard(path)
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        change(weight_map)
        write_index(path, weight_map)

    return spoil


def _twice(path: Path) -> None:
    shard(path)
    tensors = read_tensors(path / _SECOND)
    name, entry = next(iter(read_tensors(path / _FIRST).items()))
    write_tensors(path / _SECOND, tensors | {name: entry})


def _outside(weight_map: dict[str, str]) -> None:
    weight_map[_UP] = f"../{SINGLE}"


_ADD_TOKEN = dict(
    id=5000, content="<far>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=False
)
_CHAT = ("--task.style", "chat")
_FP8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])

WRONG_MODELS = [
    WrongModel("no such directory", _nowhere, ("no such directory",)),
    WrongModel("a file", _file_instead, ("it is a file",)),
    WrongModel("no config", _without("config.json"), ("config.json", "titan-rl model")),
    WrongModel("config cannot be read", _unreadable_config, ("config.json",)),
    WrongModel("config is cut short", _text("config.json", '{"model_type": "llama",'), ("config.json", "JSON")),
    WrongModel("config is a list", _text("config.json", "[1, 2]"), ("config.json", "object")),
    WrongModel("config is binary", _text("config.json", b"\xff\xfe\x00"), ("config.json", "JSON")),
    WrongModel("adapter", _both(_renamed("config.json", "adapter_config.json")), ("LoRA", "merge")),
    WrongModel("type unknown", _config(model_type="gpt2"), ("'gpt2'", "llama", "model.family")),
    WrongModel("type missing", _config(model_type=None), ("model_type",)),
    WrongModel("no architectures", _config(architectures=None), ("architectures", "LlamaForCausalLM")),
    WrongModel("a reward model", _config(architectures=["LlamaForSequenceClassification"]), ("architectures",)),
    WrongModel("size is text", _config(hidden_size="128"), ("hidden_size", "'128'")),
    WrongModel("size is negative", _config(intermediate_size=-384), ("intermediate_size", "-384")),
    WrongModel("size is true", _config(num_hidden_layers=True), ("num_hidden_layers", "True")),
    WrongModel("size is missing", _config(hidden_size=None), ("no hidden_size",)),
    WrongModel("biases", _config(mlp_bias=True), ("mlp_bias = true", "'llama' with biases are not supported")),
    WrongModel("no layers", _config(num_hidden_layers=0), ("num_hidden_layers",)),
    WrongModel("a layer more", _config(num_hidden_layers=5), ("lacks 9 tensors", "model.layers.4")),
    WrongModel("a layer less", _config(num_hidden_layers=3), ("9 tensors", "model.layers.3")),
    WrongModel("heads do not divide", _config(num_key_value_heads=3), ("num_attention_heads", "3")),
    WrongModel("heads do not divide the width", _config(num_attention_heads=6), ("hidden_size", "6")),
    WrongModel("odd heads", _config(head_dim=31), ("head_dim", "31")),
    WrongModel("epsilon is text", _config(rms_norm_eps="small"), ("rms_norm_eps",)),
    WrongModel("tied is text", _config(tie_word_embeddings="yes"), ("tie_word_embeddings",)),
    WrongModel(
        "rope unknown", _config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), ("dynamic",)
    ),
    WrongModel("rope without factor", _config(rope_scaling={"rope_type": "linear"}), ("factor", "linear")),
    WrongModel("rope is text", _config(rope_scaling="yarn"), ("rope_scaling", "yarn")),
    WrongModel("rope theta", _config(rope_parameters={"rope_type": "default", "rope_theta": -1}), ("rope_theta",)),
    WrongModel("quantization", _config(quantization_config=_FP8), ("quantization_config", "fp8")),
    WrongModel("FP8 in config", _config(dtype="float8_e4m3fn"), ("float8_e4m3fn",)),
    WrongModel("end outside", _both(_config(eos_token_id=5000)), ("eos_token_id = 5000", "99")),
    WrongModel("end outside, generation", _json("generation_config.json", eos_token_id=[1, 99]), ("99",)),
    WrongModel("end is text", _config(eos_token_id="<eos>"), ("eos_token_id", "<eos>")),
    WrongModel("end is negative", _config(eos_token_id=-1), ("eos_token_id", "-1")),
    WrongModel("no end", _both(_config(eos_token_id=None), _without("generation_config.json")), ("eos_token_id",)),
    WrongModel("no tokenizer", _without("tokenizer.json"), ("tokenizer.json",)),
    WrongModel("tokenizer is cut short", _text("tokenizer.json", '{"version": "1.0",'), ("tokenizer.json",)),
    WrongModel("tokenizer is another thing", _text("tokenizer.json", "{}"), ("tokenizer.json",)),
    WrongModel("tokenizer settings", _text("tokenizer_config.json", "[]"), ("tokenizer_config.json",)),
    WrongModel(
        "tokenizer is larger", _json("tokenizer.json", added_tokens=[_ADD_TOKEN]), ("tokenizer", "vocab_size = 99")
    ),
    WrongModel("vocabulary is smaller", _config(vocab_size=50), ("tokenizer", "vocab_size = 50")),
    WrongModel("vocabulary is larger", _config(vocab_size=128), (_EMBEDDING, "(99, 128)", "(128, 128)")),
    WrongModel("no chat template", lambda path: None, ("chat template",), _CHAT),
    WrongModel("chat template is a number", _json("tokenizer_config.json", chat_template=5), ("chat template",), _CHAT),
    WrongModel(
        "no chat template is the default",
        _json("tokenizer_config.json", chat_template=[dict(name="tools", template="{{ messages }}")]),
        ("chat template", "default"),
        _CHAT,
    ),
    WrongModel("no weights", _without(SINGLE), ("no *.safetensors",)),
    WrongModel("pickles", _renamed(SINGLE, "pytorch_model.bin"), ("pickles",)),
    WrongModel("GGUF", _renamed(SINGLE, "model.gguf"), ("GGUF",)),
    WrongModel("weights are empty", _text(SINGLE, ""), (SINGLE, "0 bytes")),
    WrongModel("weights are cut short", lambda p: _text(SINGLE, (p / SINGLE).read_bytes()[:-9])(p), (SINGLE, "bytes")),
    WrongModel("weights are longer", lambda p: _text(SINGLE, (p / SINGLE).read_bytes() + b"1")(p), (SINGLE, "bytes")),
    WrongModel("weights are a pointer", _text(SINGLE, "version https://git-lfs.github.com/spec/v1\n"), (SINGLE,)),
    WrongModel(
        "weights are a dead link", _both(_without(SINGLE), lambda p: (p / SINGLE).symlink_to("blob")), (SINGLE,)
    ),
    WrongModel("header lies of its length", _text(SINGLE, struct.pack("<Q", 2**40) + b"{}"), (SINGLE, "header")),
    WrongModel("header is no table", lambda p: write_raw(p / SINGLE, [1], b""), (SINGLE, "table")),
    WrongModel("offsets overlap", _header(lambda h: h[_UP].update(data_offsets=[0, 196608])), (SINGLE, "byte")),
    WrongModel("offsets beyond", _header(lambda h: h[_UP].update(data_offsets=[10**9, 10**9 + 196608])), (SINGLE,)),
    WrongModel("offsets are text", _header(lambda h: h[_UP].update(data_offsets=["0", "4"])), (_UP,)),
    WrongModel("shape lies", _header(lambda h: h[_UP].update(shape=[384, 64])), (_UP, "bytes")),
    WrongModel("tensor missing", _in_place(lambda tensors: tensors.pop(_UP)), ("lacks 1 tensors", _UP)),
    WrongModel("tensor extra", _in_place(lambda t: t.update(more=t[_UP])), ("more", "does not ask for")),
    WrongModel("shape differs", _in_place(_cut), (_UP, "(383, 128)", "(384, 128)")),
    WrongModel("FP8", _in_place(_as_dtype("F8_E4M3", 1)), (_UP, "F8_E4M3")),
    WrongModel("INT8", _in_place(_as_dtype("I8", 1)), (_UP, "I8")),
    WrongModel("NaN", _in_place(_with_value(struct.pack("<f", float("nan")), "F32")), (_UP, SINGLE, "NaN")),
    WrongModel("infinity in bf16", _in_place(_with_value(b"\x80\x7f", "BF16")), (_UP, SINGLE, "NaN")),
    WrongModel("infinity in fp16", _in_place(_with_value(b"\x00\xfc", "F16")), (_UP, SINGLE, "NaN")),
    WrongModel("a backup beside it", _copied(SINGLE, "model-backup.safetensors"), ("model-backup", INDEX)),
    WrongModel("a stale shard beside it", _copied(SINGLE, _SECOND), (_SECOND, INDEX)),
    WrongModel("index without file", _both(shard, _without(_SECOND)), (INDEX, _SECOND)),
    WrongModel("index names what is not there", _index(lambda m: m.update(more=_FIRST)), (INDEX, "more")),
    WrongModel("index leaves a tensor out", _index(lambda m: m.pop(_UP)), (INDEX, _UP)),
    WrongModel("index names the other file", _index(lambda m: m.update({_UP: _FIRST, "lm_head": _SECOND})), (INDEX,)),
    WrongModel("index leads outside", _index(_outside), (INDEX, "../")),
    WrongModel("index is cut short", _both(shard, _text(INDEX, '{"weight_map": {')), (INDEX,)),
    WrongModel("index is empty", _both(shard, lambda path: write_index(path, {})), (INDEX, "weight_map")),
    WrongModel("index of other files", _both(_copied(SINGLE, "x"), shard, _renamed("x", SINGLE)), (SINGLE, INDEX)),
    WrongModel("a tensor in two shards", _twice, (_FIRST, _SECOND)),
    WrongModel("tied with another head", _in_place(_other_head), ("lm_head.weight", "tie_word_embeddings")),
    WrongModel("untied without head", _config(tie_word_embeddings=False), ("lacks 1 tensors", "lm_head.weight")),
    WrongModel("head and tied", _config(tie_word_embeddings=True), ("lm_head.weight",), is_untied=True),
]
