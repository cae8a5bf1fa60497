"""What torch.distributed.checkpoint writes and reads by, which its public functions take for granted."""

from titan_rl.compat.reach import TORCH, Reach

_DCP = "torch.distributed.checkpoint"
REACHES = (
    Reach(f"{_DCP}._fsspec_filesystem:FileSystem", "read a checkpoint in a store"),
    Reach(f"{_DCP}._fsspec_filesystem:FsspecWriter", "write a checkpoint into a store"),
    Reach(f"{_DCP}._traverse:set_element", "put a value into a state by its path"),
    Reach(f"{_DCP}.filesystem:_StorageInfo", "know where in a file a tensor is"),
    Reach(f"{_DCP}.metadata:_MEM_FORMAT_ENCODING", "read what a checkpoint says of a tensor"),
    Reach("torch.serialization:_get_layout", "read what a checkpoint says of a tensor"),
)
TORCH.require(REACHES)

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as StoreFiles
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.serialization import _get_layout as get_layout

__all__ = ["FsspecWriter", "MemoryFormat", "StorageInfo", "StoreFiles", "get_layout", "set_element"]
