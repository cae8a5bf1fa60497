"""Folders that are carried from one host to another, file by file, and known by what is in them."""

import os
from pathlib import Path

import xxhash

Manifest = dict[str, tuple[int, str]]
"""Of each file of a folder, by its path there: bytes and checksum."""
PART_BYTES = 8 << 20


def manifest_of(folder: Path) -> Manifest:
    """Manifest of a folder, for which every byte is read. Empty if there is no such folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _described(path) for path in files}


def _described(path: Path) -> tuple[int, str]:
    checksum = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(PART_BYTES):
            checksum.update(block)
        return file.tell(), checksum.hexdigest()


def read_part(path: Path, offset: int, nbytes: int) -> bytes:
    """Part of a file, at most so many bytes, from ``offset``."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


def write_part(path: Path, offset: int, data: bytes) -> None:
    """Write a part of a file at ``offset``; file and folders are made if need be, for their user alone. With offset 0
    it begins anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.O_WRONLY | os.O_CREAT | (0 if offset else os.O_TRUNC)
    with open(os.open(path, mode, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)


def remove_files(folder: Path, leaving: str) -> None:
    """Remove all files below a folder, except paths there that begin with ``leaving``."""
    for path in list(folder.rglob("*")):
        if not path.is_dir() and not path.relative_to(folder).as_posix().startswith(leaving):
            path.unlink(missing_ok=True)
