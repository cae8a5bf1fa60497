"""Files of one split among those of a Hub repository. Pure.

What the card declares under ``configs`` counts alone; without, folders and file names tell, as ``datasets`` reads them:
``main/train-00000-of-00002.parquet``, ``data/test.jsonl``, ``en/validation/0000.parquet``. Where a split's rows could
be others than those asked for, it is refused. A repository's own code is never run.
"""

import glob
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

Splits = dict[str, list[str]]
"""Split to its files in order, or to the patterns of a card."""

SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson")
DEFAULT = "default"
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_PART = "partial-"
"""What the Hub calls a split that it converted the beginning of."""
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")
_CONVERTED = re.compile(r"\d{4}")
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NOT_DATA = ("README.md", "config.json", "dataset_dict.json", "dataset_infos.json", "dataset_info.json")
_GLOB = frozenset("*?[")
_MOST_CHARACTERS = 4_000
"""Of a split's patterns: a card is hostile."""
_CONVERT = "where the Hub has converted it, add '@refs/convert/parquet'; else write it out in one of these formats"
_BY_PATH = "download those wanted, and give them by their path"


def choose_files(
    files: Sequence[str], card: Mapping[str, Any], words: Sequence[str], *, are_all: bool = True
) -> list[str]:
    """Files of the split that ``words`` name: config and split, one of them, or neither where there is no choice.

    ``card``: the front matter of README.md. ``are_all``: whether ``files`` are the repository's, and not what a cache
    has of them. Errors: ValueError that lists what there is, also for files that are missing or cannot be read.
    """
    files, entries = _data(files), declared(card)
    groups = {} if entries else inferred(files)
    if not entries and not groups:
        kinds = sorted({PurePosixPath(file).suffix for file in files} - {"", ".md"})
        raise ValueError(f"it has no Parquet or JSON lines files ({', '.join(kinds[:8]) or 'nothing'}): {_CONVERT}")
    are_known = are_all or bool(entries)
    config, word = _config(entries or groups, words, _lone_config(entries, groups, are_all=are_all))
    splits = _splits(files, entries[config]) if entries else groups[config]
    split = _split(splits, word, config, are_known=are_known)
    chosen = _matching(files, splits[split]) if entries else splits[split]
    _check_formats(chosen)
    _check_shards(chosen, with_others="data_files" in entries.get(config, {}))
    if not are_all:
        _check_counted(chosen, splits[split] if "data_files" in entries.get(config, {}) else ())
    return chosen


def _lone_config(entries: Mapping[str, Any], groups: Mapping[str, Splits], *, are_all: bool) -> str:
    """Config of a name that gives none; empty where it must."""
    if DEFAULT in entries:
        return DEFAULT
    configs = list(entries or groups)
    is_certain = are_all or bool(entries) or configs == [DEFAULT]
    return configs[0] if len(configs) == 1 and is_certain else ""


def _config(configs: Collection[str], words: Sequence[str], alone: str) -> tuple[str, str]:
    """Config, and the word for the split. Errors: ValueError."""
    words = [word for word in words if word]
    if len(words) == 1 and words[0] not in configs and alone:
        words = [alone, *words]
    config = words[0] if words else alone
    if config not in configs:
        several = "it has several configs" if len(configs) > 1 else "it may have other configs"
        what = f"it has no config {config!r}" if config else several
        raise ValueError(f"{what}: name one of {_listed(configs)}, as in organization/name:config:split")
    return config, words[1] if len(words) > 1 else ""


def _split(splits: Splits, word: str, config: str, *, are_known: bool) -> str:
    """Errors: ValueError."""
    if not splits:
        raise ValueError(f"its config {config!r} has no Parquet or JSON lines files: {_CONVERT}")
    lone = next(iter(splits)) if len(splits) == 1 and are_known else ""
    split = word or ("" if lone.startswith(_PART) else lone)
    if split not in splits:
        several = "it has several splits" if len(splits) > 1 else "it may have more than this split"
        what = f"it has no split {split!r}" if split else several
        raise ValueError(f"{what}: name one of {_listed(splits)}, as in organization/name:{config}:split")
    return split


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:20])


def _check_formats(files: Sequence[str]) -> None:
    """Errors: ValueError for a file that cannot be read, and for two formats, of which one may repeat the other."""
    if other := next((file for file in files if not file.endswith(SUFFIXES)), None):
        raise ValueError(f"its file {other} is neither Parquet nor JSON lines: {_CONVERT}")
    suffixes = sorted({PurePosixPath(file).suffix for file in files})
    if len(suffixes) > 1:
        raise ValueError(f"this split has files of several formats ({', '.join(suffixes)}): {_BY_PATH}")


def _check_shards(files: Sequence[str], *, with_others: bool) -> None:
    """Errors: ValueError for shards of which some are missing or there twice, or with other files beside them."""
    shards: dict[str, dict[int, list[int]]] = {}
    num_shards = 0
    for file in files:
        if match := _SHARD.fullmatch(PurePosixPath(file).stem):
            kind = str(PurePosixPath(file).with_name(match["split"]))
            shards.setdefault(kind, {}).setdefault(int(match["count"]), []).append(int(match["number"]))
            num_shards += 1
    for kind, counts in shards.items():
        [(count, numbers), *others] = counts.items()
        if others or len(set(numbers)) < len(numbers):
            raise ValueError(f"the files {kind}-* are there twice, in several numbers of them: {_BY_PATH}")
        if len(numbers) != count:
            raise ValueError(f"{len(numbers)} of the {count} files {kind}-* are there")
    if num_shards and len(files) > num_shards and not with_others:
        raise ValueError(f"this split has other files beside {next(iter(shards))}-*: {_BY_PATH}")


def _check_counted(files: Sequence[str], named: Sequence[str]) -> None:
    """Errors: ValueError for files of a cache beside which the split may have more. ``named``: by the card."""
    literal = set(named)
    counted = (file in literal or _SHARD.fullmatch(PurePosixPath(file).stem) for file in files)
    if file := next((file for file, is_counted in zip(files, counted, strict=True) if not is_counted), None):
        raise ValueError(f"{file} may be one of several files of the split: give them by their path")


def _data(files: Sequence[str]) -> list[str]:
    """Files but for hidden ones and those that describe the others."""
    paths = [PurePosixPath(file) for file in files]
    return [
        str(path)
        for path in paths
        if path.name not in _NOT_DATA and not any(part.startswith(".") for part in path.parts)
    ]


# by the card


def declared(card: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Config to its entry in the card; empty without any. Errors: ValueError."""
    entries = card.get("configs") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"the configs of its card are no list of tables: {_BY_PATH}")
    configs: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        name = str(entry.get("config_name", DEFAULT))
        if name in configs:
            raise ValueError(f"its card has two configs {name!r}: {_BY_PATH}")
        configs[name] = entry
    return configs


def _splits(files: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    """Split to its patterns. Errors: ValueError."""
    folder = str(entry.get("data_dir") or "").removeprefix("./").strip("/")
    prefix = f"{glob.escape(folder)}/" if folder else ""
    if "data_files" in entry:
        splits: Splits = {}
        for split, patterns in _patterns(entry["data_files"]):
            if split in splits:
                raise ValueError(f"its card has the split {split!r} twice: {_BY_PATH}")
            splits[split] = [prefix + pattern.removeprefix("./") for pattern in patterns]
        return splits
    inside = [file.removeprefix(f"{folder}/") for file in files if not folder or file.startswith(f"{folder}/")]
    return {split: [prefix + glob.escape(each) for each in found] for split, found in _merged(inferred(inside)).items()}


def _merged(configs: Mapping[str, Splits]) -> Splits:
    """Splits of all folders: what a card gives by one folder is one config."""
    splits: Splits = {}
    for split, files in (pair for group in configs.values() for pair in group.items()):
        splits.setdefault(split, []).extend(files)
    return splits


def _patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """Split and patterns of each of the forms that ``data_files`` may have. Errors: ValueError."""
    if isinstance(data_files, dict):
        return [(str(split), _texts(paths)) for split, paths in data_files.items()]
    entries = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(entry, dict) for entry in entries):
        return [(str(table.get("split", "train")), _texts(table.get("path"))) for table in entries]
    return [("train", _texts(entries))]


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each for each in values):
        raise ValueError(f"its card has data_files that are no names of files: {_BY_PATH}")
    return values


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Files that a pattern matches, by pattern and then by name, each once. Errors: ValueError for one without any."""
    globs = [pattern for pattern in patterns if _GLOB & set(pattern)]
    if sum(map(len, globs)) > _MOST_CHARACTERS:
        raise ValueError(f"the patterns of its card are longer than {_MOST_CHARACTERS} characters: {_BY_PATH}")
    there, names = set(files), sorted(files)
    parts = {name: name.split("/") for name in names} if globs else {}
    chosen: dict[str, None] = {}
    for pattern in patterns:
        is_glob = bool(_GLOB & set(pattern))
        found = [name for name in names if _matches(pattern, parts[name])] if is_glob else [pattern]
        if not found or not there.issuperset(found):
            raise ValueError(f"no file is there for {pattern[:80]!r}, which its card has for this split: {_BY_PATH}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _matches(pattern: str, parts: Sequence[str]) -> bool:
    """Match of a file's parts: ``**`` any folders, ``*``, ``?`` and ``[a-z]`` within one. No backtracking."""
    reached = {0}
    for part in pattern.split("/"):
        if part == "**":
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {place + 1 for place in reached if place < len(parts) and fnmatchcase(parts[place], part)}
        if not reached:
            return False
    return len(parts) in reached


# by names


def inferred(files: Sequence[str]) -> dict[str, Splits]:
    """Config to its splits, by folders and file names; where some tell a split, those that tell none are no data."""
    places = {file: _place(PurePosixPath(file)) for file in sorted(files) if _is_rows(file)}
    any_told = any(split for _, split in places.values())
    configs: dict[str, Splits] = {}
    for file, (config, split) in places.items():
        if split or not any_told:
            configs.setdefault(config, {}).setdefault(split or "train", []).append(file)
    return configs


def _is_rows(file: str) -> bool:
    """Whether a name is one of Parquet or JSON lines, packed or not."""
    path = PurePosixPath(file)
    return (path.stem if path.suffix in _PACKED else file).endswith(SUFFIXES)


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Config and split of a file; an empty split where its name tells none."""
    folders = list(path.parts[:-1])
    if match := _SHARD.fullmatch(path.stem):
        split = match["split"]
    elif _CONVERTED.fullmatch(path.stem) and folders:
        split = folders.pop()
    else:
        split = _split_word(path.stem)
        number = next((number for number, folder in enumerate(folders) if _split_word(folder)), None)
        if number is not None:
            split = _split_word(folders[number])
            del folders[number:]
    config = "/".join(folder for folder in folders if folder != "data")
    return config or DEFAULT, split


def _split_word(name: str) -> str:
    return next((_WORDS[word] for word in re.split(r"[-._ ]", name.lower()) if word in _WORDS), "")
