"""Location of a checkpoint's large files: its folder, or a store that all hosts reach.

Of one whose files are in a store its folder holds what is small: DCP's ``.metadata``, and ``shards.json``, which says
where the rest is. A store is a folder (of a file system that hosts share) or a URL, such as ``s3://bucket/runs``.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titan_rl.config.io.bounded_files import open_file as open_bounded
from titan_rl.config.io.bounded_files import read_json

SHARDS = "shards.json"


class StoreError(ValueError):
    """A store that cannot be used, or a ``shards.json`` that is none; says why."""


@dataclass(frozen=True)
class Shards:
    """Place and sizes of the files of one checkpoint folder."""

    at: str
    """The folder or URL that they are in."""
    sizes: dict[str, int]
    """Bytes by name."""


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a store, and what it calls the place there. Errors: StoreError."""
    import fsspec  # which runs of which nothing is stored elsewhere have no use for

    if "::" in url:
        raise StoreError("a chain of file systems is no store: give one folder or URL")
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol whose package is not installed, or that nobody knows
        raise StoreError(str(error)) from None


def shards_of(folder: Path) -> Shards | None:
    """Shards of a folder; None if the files are in the folder itself. Errors: StoreError."""
    try:
        content = read_json(folder / SHARDS)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"its {SHARDS} cannot be read ({type(error).__name__})") from None
    if not (isinstance(content, dict) and isinstance(content.get("at"), str) and _are_sizes(content.get("sizes"))):
        raise StoreError(f"its {SHARDS} does not say where files are")
    return Shards(content["at"], content["sizes"])


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, dict) and all(
        type(size) is int and size >= 0 and name == os.path.basename(name) not in ("", ".", "..")
        for name, size in sizes.items()
    )


def write_shards(folder: Path, shards: Shards) -> None:
    (folder / SHARDS).write_text(json.dumps({"at": shards.at, "sizes": shards.sizes}))


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of a checkpoint folder's files, in it and in a store. Errors: StoreError."""
    here = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return here if (shards := shards_of(folder)) is None else shards.sizes | here


def open_file(folder: Path, name: str) -> IO[bytes]:
    """A file of a checkpoint's folder, wherever it is. Errors: OSError; StoreError."""
    path, shards = folder / name, shards_of(folder)
    if shards is None or name not in shards.sizes or path.exists():
        return open_bounded(path)
    system, at = file_system(shards.at)
    return system.open(f"{at}/{name}", "rb")


def is_below(at: str, store: str) -> bool:
    """Whether a place is in a store, and not the store itself."""
    return bool(store) and at.startswith(f"{store.rstrip('/')}/") and ".." not in at.split("/")
