"""Checkpoints of torch.distributed.checkpoint read as data, without executing code from the files.

A checkpoint's ``.metadata`` is a pickle, and so is each of its items. DCP reads the former and all items that are no
tensors with pickle's full power. Whoever can write into a run directory could have any code run so, and checksums
beside the files prove nothing about who wrote them. Here the metadata may name DCP's own classes alone, and items are
read by ``torch.load(weights_only=True)``.
"""

import math
import pathlib
import warnings
import zipfile
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from titan_rl.compat.python import BuildCheckedUnpickler
from titan_rl.compat.torch.checkpoint import MemoryFormat, StorageInfo, StoreFiles, get_layout, set_element
from titan_rl.config.io.bounded_files import RefusedFile, open_file
from titan_rl.data.storage.shards import StoreError, shards_of, sizes_of
from titan_rl.data.storage.shards import open_file as open_shard

_CLASSES = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, StorageInfo),
    *(described.ChunkStorageMetadata, described.TensorProperties, described.StorageMeta),
    MemoryFormat,
)


def _encoding(kind: type, name: str) -> MemoryFormat:
    """Stands where ``getattr`` is named, by which Python 3.11.0 to 3.11.3 pickle the members of enumerations."""
    if kind is not MemoryFormat:
        raise StateError(f"its {_METADATA} names an attribute of {kind!r:.80}")
    return kind[name]


_ALLOWED = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES} | {
    ("builtins", "getattr"): _encoding,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,  # as Python 3.13 calls it
}
_METADATA = ".metadata"
_METADATA_BYTES, _ITEM_BYTES = 64 << 20, 16 << 20
"""Hundreds of thousands of tensors; numbers and text."""
_SHOWN = 300
"""Characters of another library's message."""


class StateError(ValueError):
    """Checkpoint that is no plain state, with the reason."""


class _Unpickler(BuildCheckedUnpickler):
    """Finds DCP's own classes, and sets no attributes but those of what it has made of them."""

    def find_class(self, module: str, name: str) -> Any:
        if (kind := _ALLOWED.get((module, name))) is not None:
            return kind
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise StateError(f"its {_METADATA} names {module}.{name}, which no checkpoint has")

    def check_build(self, target: Any) -> None:
        if isinstance(target, type | Enum) or callable(target):
            raise StateError(f"its {_METADATA} would change {target!r:.80}")


class PlainReader(FileSystemReader):
    """Reader of a checkpoint of any number of ranks, in a folder or a store."""

    def __init__(self, folder: Path):
        """Errors: StoreError."""
        super().__init__(folder)
        self._folder = folder
        if (shards := shards_of(folder)) is not None:
            self.fs = StoreFiles()
            self.path = self.fs.init_path(shards.at)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Errors: StateError."""
        if kwargs.get("rank") is not None:  # what DCP tries next if the common one cannot be read
            raise StateError(f"it has no {_METADATA} of all ranks")
        metadata = read_metadata(self._folder)
        if metadata.storage_meta is None:
            metadata.storage_meta = described.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Load planner with numbers and text for items that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _plain_value(value))


def load_state(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fill ``state`` from a checkpoint. All ranks call this together, unless ``no_dist``.

    Errors: StateError, also for a checkpoint that does not fit; what interrupts the load, such as KeyboardInterrupt."""
    try:
        reader = PlainReader(folder)
    except StoreError as error:
        raise StateError(f"{folder} cannot be loaded: {error}") from None
    try:
        with warnings.catch_warnings():
            if no_dist:  # as was asked for, which torch warns of
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=reader, planner=PlainPlanner(), no_dist=no_dist)
    except CheckpointException as failure:  # a BaseException
        cause, _ = failure.failures.get(0 if no_dist else dist.get_rank(), (failure, None))
        if not isinstance(cause, Exception | CheckpointException):
            raise cause from None  # an interrupt of this process says nothing about the checkpoint
        raise StateError(f"{folder} cannot be loaded: {reason_of(failure)}") from failure


def reason_of(failure: BaseException) -> str:
    """Reason for a failed save or load, in one line; of DCP's exception, what its first rank raised."""
    where = ""
    if isinstance(failure, CheckpointException):
        rank, (failure, _) = min(failure.failures.items(), key=lambda item: item[0])
        where = f"rank {rank}: "
    return f"{where}{type(failure).__name__}: {' '.join(str(failure).split())[:_SHOWN]}"


def read_metadata(folder: Path) -> Metadata:
    """Tensors of a checkpoint, and their places. Errors: StateError for files that DCP did not write."""
    try:
        with open_file(folder / _METADATA, _METADATA_BYTES) as file:
            metadata = _Unpickler(file).load()
    except StateError:
        raise
    except RefusedFile as error:
        raise StateError(str(error)) from None
    except OSError as error:
        raise StateError(f"its {_METADATA} cannot be read: {error.strerror}") from None
    except Exception as error:  # a pickle that is cut short or made up may raise anything
        raise StateError(f"its {_METADATA} cannot be read ({type(error).__name__})") from None
    _check(metadata, folder)
    return metadata


def state_flaw(folder: Path) -> str | None:
    """Reason why a checkpoint cannot be read, checked without its tensors; None: it can."""
    try:
        _check_values(read_metadata(folder), folder)
    except StateError as error:
        return str(error)
    return None


def _plain_value(item: BytesIO) -> Any:
    """Of an item as ``torch.save`` writes it: a zip archive of what is not compressed, which a forged one might be.
    Errors: whatever made-up bytes raise."""
    with zipfile.ZipFile(item) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise ValueError("a compressed item")
    item.seek(0)
    return torch.load(item, weights_only=True)


def _check_values(metadata: Metadata, folder: Path) -> None:
    """Errors: StateError if an item that is no tensor is more than numbers and text."""
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            continue
        try:
            if place.length > _ITEM_BYTES:
                raise ValueError(place.length)
            with open_shard(folder, place.relative_path) as file:
                file.seek(place.offset)
                _plain_value(BytesIO(file.read(place.length)))
        except Exception as error:  # whatever made-up bytes raise
            raise StateError(f"its {index.fqn} is no plain value ({type(error).__name__})") from None


def _check(metadata: Any, folder: Path) -> None:
    """Errors: StateError unless it is of DCP's types, and all of it lies in files of that folder."""
    try:
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        sizes = sizes_of(folder)
        is_sound = (
            all(
                isinstance(name, str) and _is_sound_entry(entry, sum(sizes.values())) for name, entry in entries.items()
            )
            and all(isinstance(index, MetadataIndex) and _lies_in(place, sizes) for index, place in places.items())
            and isinstance(metadata.storage_meta, described.StorageMeta | None)
        )
    except (AttributeError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise StateError(f"its {_METADATA} does not describe the files beside it")


def _is_sound_entry(entry: Any, total_bytes: int) -> bool:
    """A tensor is no larger than all files together."""
    if isinstance(entry, TensorStorageMetadata):
        shapes = [entry.size, *(shape for chunk in entry.chunks for shape in (chunk.sizes, chunk.offsets))]
        are_sizes = all(isinstance(shape, torch.Size) and all(length >= 0 for length in shape) for shape in shapes)
        return are_sizes and math.prod(entry.size) * entry.properties.dtype.itemsize <= total_bytes
    return isinstance(entry, BytesStorageMetadata)


def _lies_in(place: Any, sizes: dict[str, int]) -> bool:
    is_place = isinstance(place, StorageInfo) and place.relative_path in sizes and not place.transform_descriptors
    return is_place and 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]
