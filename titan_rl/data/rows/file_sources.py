"""Sources of rows: what a ``file`` setting names, found on this machine or fetched from the Hub.

    "questions.jsonl"  "data/*.parquet"         a path; a glob, whose files come in the order of their names
    "saved"  "saved:train"                      a directory of ``datasets``; a split of a dictionary of several
    "openai/gsm8k:main:train@e53f048"           organization/name, config, split and revision on the Hub
    [{ path = "a.jsonl", weight = 2.0 }, "b"]   several; weights are shares of the rows drawn

Left to others: what the files hold (``row_files.py``) and the order of rows (``splits.py``).
"""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.rows.row_files import SUFFIXES, RawRow, ReadFile, find_file, read_raw_rows, without_tilde
from titan_rl.data.storage.hub_dataset import fetch_split, parse_hub_name

_MOST_FILES = 10_000
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Source:
    """Files of one name."""

    name: str
    paths: tuple[Path, ...]
    weight: float | None = None
    """Part of the rows drawn, among those of all sources; None: every row is drawn as often as any other."""
    commit: str = ""
    """Of the Hub."""


def locate_sources(setting: str, files: Any, folders: Sequence[str]) -> list[Source]:
    """Sources that a ``file`` setting names, in its order.

    ``folders``: where relative paths are looked for, in turn. Errors: ConfigError for one that is not there.
    """
    entries = files if isinstance(files, list) else [files]
    tables = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
    weighted = any("weight" in table for table in tables)
    found = [_find(setting, table["path"], folders) for table in tables]
    weights = [float(table.get("weight", 1.0)) if weighted else None for table in tables]
    sources = [
        Source(table["path"], paths, weight, commit)
        for table, weight, (paths, commit) in zip(tables, weights, found, strict=True)
    ]
    _check_once(setting, sources)
    return sources


def _check_once(setting: str, sources: Sequence[Source]) -> None:
    """Errors: ConfigError for a file that is named twice, whose rows would be read twice."""
    names: dict[Path, str] = {}
    for source in sources:
        for path in source.paths:
            file = path.absolute() if source.commit else path.resolve()  # in a cache equal files are one
            if file in names:
                raise ConfigError(f"{setting}: {names[file]!r} and {source.name!r} both name {path}: name it once")
            names[file] = source.name


def _find(setting: str, name: str, folders: Sequence[str]) -> tuple[tuple[Path, ...], str]:
    """Paths, and a commit of the Hub. Errors: ConfigError."""
    places = [Path(folder, without_tilde(setting, name)) for folder in folders or ["."]]
    if there := next((place for place in places if place.is_dir() or place.is_file()), None):
        return (there if there.is_dir() else find_file(setting, name, folders),), ""
    if split := _split_directory(setting, name, places):
        return (split,), ""
    if _GLOB & set(name):
        return _matching(setting, name, folders or ["."]), ""
    if _is_of_hub(name, places):
        hub_name = parse_hub_name(name)
        assert hub_name is not None, "it has the form of one"
        try:
            fetched = fetch_split(hub_name)
        except ValueError as error:
            raise ConfigError(f"{setting} = {name!r}: {error}") from None
        return fetched.paths, fetched.commit
    return (find_file(setting, name, folders),), ""


def _split_directory(setting: str, name: str, places: Sequence[Path]) -> Path | None:
    """Directory of a split of a ``DatasetDict``. Errors: ConfigError if the dictionary has no such split."""
    split = name.rpartition(":")[2]
    if split in (name, "") or "/" in split or name == f":{split}":
        return None
    roots = [Path(str(place).removesuffix(f":{split}")) for place in places]
    root = next((root for root in roots if root.is_dir()), None)
    if root is None:
        return None
    splits = [folder.name for folder in root.iterdir() if folder.is_dir()]
    if split not in splits:
        raise ConfigError(f"{setting} = {name!r}: {root} has no split {split!r}: {nearest(split, splits)}")
    return root / split


def _matching(setting: str, name: str, folders: Sequence[str]) -> tuple[Path, ...]:
    """Files of a glob, of the first folder where it matches any. Errors: ConfigError."""
    pattern = without_tilde(setting, name)
    for folder in folders:
        found = sorted(glob.glob(str(pattern), root_dir=folder, recursive=True))
        paths = [path for each in found if (path := Path(folder, each)).is_file()]
        if len(paths) > _MOST_FILES:
            raise ConfigError(f"{setting} = {name!r} matches {len(paths)} files: write them into fewer")
        if other := next((path for path in paths if path.suffix not in SUFFIXES), None):
            raise ConfigError(f"{setting} = {name!r} matches {other}: end the glob in one of {', '.join(SUFFIXES)}")
        if paths:
            return tuple(paths)
    where = " or ".join(dict.fromkeys(str(Path(folder, pattern)) for folder in folders))
    raise ConfigError(f"{setting} = {name!r}: no file matches {where}: correct the pattern")


def _is_of_hub(name: str, places: Sequence[Path]) -> bool:
    """Whether a name is one of the Hub, and not of a file in a folder that is here."""
    hub_name = parse_hub_name(name)
    if hub_name is None or name.endswith(SUFFIXES):
        return False
    return bool(hub_name.words or hub_name.revision) or not any(place.parent.exists() for place in places)


def read_sources(sources: Sequence[Source], read: ReadFile = read_raw_rows) -> Iterator[tuple[int, RawRow]]:
    """Number of the source, and each of its rows, in order. Errors: ConfigError; OSError."""
    names = _file_names([path for source in sources for path in source.paths])
    for number, source in enumerate(sources):
        for path in source.paths:
            for row in read(path, names[path]):
                yield number, row


def _file_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Names of files in the places of their rows: as many last parts of a path as tell it from all others."""
    names, num_parts = {path: path.name for path in paths}, 1
    while twice := {name for name, count in Counter(names.values()).items() if count > 1}:
        num_parts += 1
        names |= {path: "/".join(path.parts[-num_parts:]) for path, name in names.items() if name in twice}
    return names


def list_names(sources: Sequence[Source]) -> str:
    """Names of all sources, for messages."""
    return ", ".join(source.name for source in sources)


def check_unweighted(setting: str, files: Any) -> None:
    """Check of rows that are all read once. Errors: ConfigError for weights."""
    if any(isinstance(entry, dict) and "weight" in entry for entry in (files if isinstance(files, list) else [])):
        raise ConfigError(f"{setting}: held-out rows are asked once each, so weights have no effect: leave them out")
