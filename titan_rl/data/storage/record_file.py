"""Records in a temporary file without a name: written once, one after another, and read by number.

No other user's process can write to it, so what is read is not checked again. The file is gone when the process ends,
however that ends. A forked process reads the same records.
"""

import errno
import os
import tempfile
from array import array
from pathlib import Path

from titan_rl.data.storage.files import wanting

_BLOCK_BYTES = 1 << 20
"""Written at once."""


class RecordFile:
    """Records of bytes; the memory holds where each ends, and no more."""

    def __init__(self) -> None:
        """Errors: OSError where no temporary file can be made."""
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (ends with this)
        self._ends = array("q", [0])
        self._waiting = bytearray()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, record: bytes) -> None:
        """Add a record, which can be read after ``flush``. Errors: DiskFull; OSError."""
        self._waiting += record
        self._ends.append(self._ends[-1] + len(record))
        if len(self._waiting) >= _BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits to be written. Errors: DiskFull; OSError."""
        with wanting(Path(tempfile.gettempdir()), len(self._waiting)), memoryview(self._waiting) as left:
            written = 0
            while written < len(left):
                written += self._file.write(left[written:])
        self._waiting = bytearray()

    def read(self, number: int) -> bytes:
        """Record of a number from 0 on. Errors: OSError."""
        assert not self._waiting, "records are read once all are written"
        start, stop = self._ends[number], self._ends[number + 1]
        record = os.pread(self._file.fileno(), stop - start, start)
        if len(record) < stop - start:
            raise OSError(errno.EIO, "a temporary file of this process was cut short")
        return record
