"""Folder of what a constitution makes: its settings, the journal of replies, rows and summary.

principles.json    settings, to tell whether a later start means the same
exchanges.jsonl    the journal of replies (asking.py)
revisions.jsonl, pairs.jsonl    rows to train on (rows.py)
summary.json       numbers (summary.py)
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError
from titan_rl.data.storage.files import replace_text
from titan_rl.diagnostics.principles.rows import FILES
from titan_rl.records.preferences.collection import Served, lock
from titan_rl.records.run_directory.path_checks import check_own, check_place
from titan_rl.records.run_directory.rundir import sync_path

EXCHANGES, SUMMARY = "exchanges.jsonl", "summary.json"
_SETTINGS, _LOCK, _WHAT = "principles.json", "lock", "folder of rows"
_WRITTEN = (_SETTINGS, SUMMARY, *FILES)
_BEGUN = {_LOCK, f".{_SETTINGS}.writing"}
"""Files before the settings, where a start may have been killed."""


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check of the folder, which may be a new one. Errors: ConfigError, also if it was begun with other settings."""
    check_place(folder, write=True, what=_WHAT)
    check_own(folder, (EXCHANGES, _LOCK, *_WRITTEN, *(f".{name}.writing" for name in _WRITTEN)), (), what=_WHAT)
    if not (folder / _SETTINGS).exists():
        if folder.exists() and not {path.name for path in folder.iterdir()} <= _BEGUN:
            raise ConfigError(f"{folder} is not empty and holds no rows of principles: give another --out")
        return
    begun = _read_settings(folder / _SETTINGS)
    if (
        other := next((name for name in {**begun, **settings} if begun.get(name) != settings.get(name)), None)
    ) is not None:
        raise ConfigError(f"{folder} was begun with another {other}: give another --out")


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give another --out") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings: restore it, or give another --out")
    return settings


@contextmanager
def held(folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """The folder with its settings, of this process alone as long as the block lasts. Errors: ConfigError; DiskFull."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; give another --out") from None
    try:
        lock_file = lock(folder)
    except Served:
        raise ConfigError(f"{folder} is another process's, which is at work there: wait for it, or end it") from None
    with lock_file:
        check_folder(folder, settings)
        write_json(folder / _SETTINGS, settings)
        yield


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write it to stay. Errors: DiskFull."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
    sync_path(path)
    sync_path(path.parent)
