"""Files that appear whole or not at all, append-only files, and messages for a full disk."""

import errno
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAID = "the disk is full"
_TEXTS = (_SAID, "No space left on device", "Disk quota exceeded", "os error 28", "database or disk is full")
"""How it reads where only the text comes through: from other processes and other languages."""
_WHOLE_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 64 << 20, 256, 64 << 10
_CRAMPED_BYTES = 1 << 20
"""With less left, SQLite's errors of input and output are taken for a full disk, as its shared memory tells no more."""


class DiskFull(OSError):
    """Full disk: the message has the file, the bytes needed and those left."""


def is_full(error: BaseException, path: Path = Path()) -> bool:
    """Whether an error means that the disk, of ``path`` if it matters, is full."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _free_bytes(path) < _CRAMPED_BYTES:
        return True
    return isinstance(error, DiskFull) or any(text in str(error) for text in _TEXTS)


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.is_dir())).free


@contextmanager
def wanting(path: Path, num_bytes: int) -> Iterator[None]:
    """The block writes so many bytes to ``path``. Errors: DiskFull in the place of whatever says so."""
    try:
        yield
    except Exception as error:  # each library tells of a full disk by errors of its own
        if not is_full(error, path) or isinstance(error, DiskFull):
            raise
        wants, left = (f"{count / 1e6:,.3f} MB" for count in (num_bytes, _free_bytes(path)))
        raise DiskFull(f"{_SAID}: {path} wants {wants}, and {left} are left") from error


@contextmanager
def unless_full() -> Iterator[None]:
    """Context of an optional write, which is skipped on a full disk."""
    try:
        yield
    except Exception as error:  # as above
        if not is_full(error):
            raise


class LineFile:
    """Lines at the end of a file, each written at once. One that was cut short is ended before the next."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (closed by close)
        self._is_torn = False
        if path.stat().st_size:
            self._file.seek(-1, os.SEEK_END)
            self._is_torn = self._file.read(1) != b"\n"

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def write(self, line: str) -> None:
        """Append a line. Errors: DiskFull, and the line may be there in part."""
        data = b"\n" * self._is_torn + line.encode() + b"\n"
        with wanting(self._path, len(data)):
            num_written = self._file.write(data)
            if num_written:
                self._is_torn = num_written < len(data)
            if num_written != len(data):
                raise OSError(errno.ENOSPC, "cut short")

    def close(self) -> None:
        self._file.close()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file or a new folder to; when the block ends without an error, it takes the place of ``path``.

    A reader sees the old file or the new one, never half of either. After an error, half a file is removed, since the
    disk may be full; half a folder stays, and the next attempt writes over it. A folder can only take a place where
    there is none yet.
    """
    beside = path.with_name(f".{path.name}.writing")
    try:
        yield beside
        beside.replace(path)
    except BaseException:  # a cancellation leaves no half file either
        if beside.is_file():
            beside.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole of ``path``, in one step for a reader."""
    with wanting(path, len(text)), replacing(path) as beside:
        beside.write_text(text)


def try_lock(handle: int, kind: int) -> bool:
    """Lock an open file or folder; whether no other process holds it.

    ``kind``: fcntl's LOCK_SH or LOCK_EX. A file system without locks holds nothing."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def sampled_checksum(path: Path) -> str:
    """A large file is sampled, at places that are spread over all of it: enough to tell one model from another, in
    milliseconds, and nothing that shows every changed byte."""
    checksum, size = xxhash.xxh3_128(), path.stat().st_size
    checksum.update(str(size).encode())
    with open(path, "rb") as file:
        for start in _starts(size):
            file.seek(start)
            checksum.update(file.read(_SAMPLE_BYTES))
    return checksum.hexdigest()


def _starts(size: int) -> list[int]:
    """Where samples begin: of a small file everywhere, of a large one the first and last bytes and between."""
    if size <= _WHOLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [(size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]
