"""Files of one split among those of a Hub repository. Pure.

What the card declares under ``configs`` counts; without, folders and file names tell, as ``datasets`` reads them:
``main/train-00000-of-00002.parquet``, ``data/test.jsonl``, ``en/validation/0000.parquet``. A repository's own code is
never run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

Splits = dict[str, list[str]]
"""Split to its files, in order."""

SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson")
DEFAULT = "default"
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")
_CONVERTED = re.compile(r"\d{4}")
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NOT_DATA = ("dataset_infos.json", "dataset_info.json")


def choose_files(files: Sequence[str], card: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Files of the split that ``words`` name: config and split, one of them, or neither where there is no choice.

    ``card``: the front matter of README.md. Errors: ValueError that lists what there is, also for missing shards.
    """
    configs = declared(files, card) or inferred(files)
    if not configs:
        kinds = sorted({PurePosixPath(file).suffix for file in files if not file.startswith(".")} - {"", ".md"})
        raise ValueError(
            f"it has no Parquet or JSON lines files ({', '.join(kinds[:8]) or 'nothing'}): where the Hub has converted "
            f"it, add '@refs/convert/parquet'; else write it out in one of these formats"
        )
    config, split = _named(configs, words)
    chosen = configs[config][split]
    _check_shards(chosen)
    return chosen


def _named(configs: Mapping[str, Splits], words: Sequence[str]) -> tuple[str, str]:
    """Config and split. Errors: ValueError."""
    words = [word for word in words if word]
    alone = DEFAULT if DEFAULT in configs else next(iter(configs)) if len(configs) == 1 else ""
    if len(words) == 1 and words[0] not in configs and alone:
        words = [alone, *words]
    config = words[0] if words else alone
    if config not in configs:
        what = f"it has no config {config!r}" if config else "it has several configs"
        raise ValueError(f"{what}: name one of {', '.join(sorted(configs))}, as in organization/name:config:split")
    splits = configs[config]
    split = words[1] if len(words) > 1 else next(iter(splits)) if len(splits) == 1 else ""
    if split not in splits:
        what = f"it has no split {split!r}" if split else "it has several splits"
        raise ValueError(f"{what}: name one of {', '.join(sorted(splits))}, as in organization/name:{config}:split")
    return config, split


def _check_shards(files: Sequence[str]) -> None:
    """Errors: ValueError for shards of which some are missing."""
    counts: dict[tuple[str, int], int] = {}
    for file in files:
        if match := _SHARD.fullmatch(PurePosixPath(file).stem):
            kind = str(PurePosixPath(file).with_name(match["split"])), int(match["count"])
            counts[kind] = counts.get(kind, 0) + 1
    if short := next(((kind, count) for kind, count in counts.items() if count < kind[1]), None):
        (name, count), there = short
        raise ValueError(f"{there} of the {count} files {name}-* are there")


def _readable(files: Sequence[str]) -> list[str]:
    paths = [PurePosixPath(file) for file in files]
    return [
        str(path)
        for path in paths
        if path.suffix in SUFFIXES
        and path.name not in _NOT_DATA
        and not any(part.startswith(".") for part in path.parts)
    ]


# by the card


def declared(files: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    """Config to its splits, as the card has them; empty without."""
    entries = card.get("configs")
    configs: dict[str, Splits] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and (splits := _splits(files, entry)):
            configs[str(entry.get("config_name", DEFAULT))] = splits
    return configs


def _splits(files: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [file for file in files if not folder or file.startswith(f"{folder}/")]
    if "data_files" not in entry:
        return next(iter(inferred(inside).values()), {})
    splits = {
        split: _matching(_readable(inside), [f"{folder}/{each}" if folder else each for each in patterns])
        for split, patterns in _patterns(entry["data_files"])
    }
    return {split: found for split, found in splits.items() if found}


def _patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """Split and patterns of each of the forms that ``data_files`` may have."""
    if isinstance(data_files, dict):
        return [(str(split), _texts(paths)) for split, paths in data_files.items()]
    entries = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(entry, str) for entry in entries):
        return [("train", list(entries))]
    tables = [entry for entry in entries if isinstance(entry, dict)]
    return [(str(table.get("split", "train")), _texts(table.get("path"))) for table in tables]


def _texts(value: Any) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Files that a pattern matches, by pattern and then by name, each once."""
    regexes = [re.compile(_regex(pattern.removeprefix("./"))) for pattern in patterns]
    return list(dict.fromkeys(file for regex in regexes for file in sorted(files) if regex.fullmatch(file)))


def _regex(pattern: str) -> str:
    """``**`` for any folders, ``*`` and ``?`` within one."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(part) or re.escape(part) for part in parts)


# by names


def inferred(files: Sequence[str]) -> dict[str, Splits]:
    """Config to its splits, by folders and file names."""
    configs: dict[str, Splits] = {}
    for file in sorted(_readable(files)):
        config, split = _place(PurePosixPath(file))
        configs.setdefault(config, {}).setdefault(split, []).append(file)
    return configs


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Config and split of a file."""
    folders = list(path.parts[:-1])
    if match := _SHARD.fullmatch(path.stem):
        split = match["split"]
    elif _CONVERTED.fullmatch(path.stem) and folders:
        split = folders.pop().removeprefix("partial-")
    else:
        split = _split_word(path.stem)
        number = next((number for number, folder in enumerate(folders) if _split_word(folder)), None)
        if number is not None:
            split = _split_word(folders[number])
            del folders[number:]
    config = "/".join(folder for folder in folders if folder != "data")
    return config or DEFAULT, split or "train"


def _split_word(name: str) -> str:
    return next((_WORDS[word] for word in re.split(r"[-._ ]", name.lower()) if word in _WORDS), "")
