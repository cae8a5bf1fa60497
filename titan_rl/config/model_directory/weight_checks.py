"""What a directory's weights can be refused for: dtypes, names, shapes, a head that is not the embedding, NaN."""

from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from typing import TYPE_CHECKING

from titan_rl.config.model_directory.config_checks import CLASSIFIER
from titan_rl.config.model_directory.safetensors_files import ITEM_BYTES, StoredTensor

if TYPE_CHECKING:  # commands that look at no weights begin sooner without it
    import numpy as np

SCANNED_BYTES = 2**30
"""So many bytes of weights are searched for NaN and infinities before anything starts: a second or two. Of a larger
model it is the first part of every tensor; the trainer looks at all values while it loads them."""
_CHUNK_BYTES = 2**24
_EXPONENTS = {"F32": ("uint32", 0x7F800000), "BF16": ("uint16", 0x7F80), "F16": ("uint16", 0x7C00)}
"""The bits that are all set in NaN and infinities, and in nothing else."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"
"""As transformers' models for sequence classification have it."""


def check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    """Errors: ValueError for FP8, INT8 and whatever else is no plain floating-point number."""
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(
                f"{name} in {tensor.file.name} is {tensor.dtype}: quantized weights cannot be trained; take the model "
                f"in bfloat16, float16 or float32"
            )


def check_writes(tensors: Mapping[str, StoredTensor]) -> None:
    """Errors: ValueError for weights of a classifier, whatever config.json calls the model."""
    if VALUE_HEAD in tensors and _HEAD not in tensors:
        raise ValueError(f"it holds {VALUE_HEAD} and no {_HEAD}: {CLASSIFIER}")


def check_names(tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> None:
    """Errors: ValueError for a tensor that the model needs and that is not there, one that it does not have, or one of
    another shape. An output head beside tied embeddings is fine if it is the embedding."""
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"it lacks {len(missing)} tensors that config.json asks for, first {missing[0]}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} in {tensors[name].file.name} is {tensors[name].shape}, and config.json asks for {shape}"
            )
    extra = [name for name in tensors if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if is_tied and _HEAD in extra:
        _check_tied(tensors)
        extra.remove(_HEAD)
    if extra:
        raise ValueError(
            f"{tensors[extra[0]].file.name} holds {len(extra)} tensors that config.json does not ask for, first "
            f"{extra[0]}: config.json and weights belong to different models"
        )


def check_value_names(tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """``check_names`` for a model that is to have a value head: it may come with one, of one label, or with a head for
    words, which is left aside. ``expected``: with or without a head."""
    head = tensors.get(VALUE_HEAD)
    if head is not None and (len(head.shape) != 2 or head.shape[0] != 1):
        raise ValueError(f"{VALUE_HEAD} in {head.file.name} is {head.shape}: a value head has one label")
    heads = (_HEAD, VALUE_HEAD)
    body = {name: tensor for name, tensor in tensors.items() if name not in heads}
    check_names(body, {name: shape for name, shape in expected.items() if name not in heads}, is_tied=False)


def _check_tied(tensors: Mapping[str, StoredTensor]) -> None:
    head, embedding = tensors[_HEAD], tensors.get(_EMBEDDING)
    if embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or _differ(head, embedding):
        raise ValueError(
            f"{_HEAD} is not {_EMBEDDING}, and tie_word_embeddings = true in config.json says that they are one: set "
            f"it to false, or remove {_HEAD}"
        )


def _differ(one: StoredTensor, other: StoredTensor) -> bool:
    import numpy as np

    return any(not np.array_equal(a, b) for a, b in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(tensor: StoredTensor, most: int | None = None) -> "Iterator[np.ndarray]":
    """The tensor's bits as integers, piece by piece; at most the first ``most`` bytes."""
    import numpy as np

    kind = np.dtype(_EXPONENTS[tensor.dtype][0])
    stop = tensor.stop if most is None else min(tensor.stop, tensor.start + most // kind.itemsize * kind.itemsize)
    for start in takewhile(lambda start: start < stop, count(tensor.start, _CHUNK_BYTES)):
        number = (min(start + _CHUNK_BYTES, stop) - start) // kind.itemsize
        yield np.fromfile(tensor.file, kind, number, offset=start)


def check_finite(tensors: Mapping[str, StoredTensor]) -> None:
    """Errors: ValueError that names a tensor with NaN or an infinity, among the first SCANNED_BYTES."""
    total = sum(tensor.stop - tensor.start for tensor in tensors.values())
    most = None if total <= SCANNED_BYTES else SCANNED_BYTES // len(tensors)
    for name, tensor in tensors.items():
        mask = _EXPONENTS[tensor.dtype][1]
        if any((bits & mask).max() == mask for bits in _chunks(tensor, most)):
            raise ValueError(f"{name} in {tensor.file.name} holds NaN or infinities: copy the file again")
