"""Checkpoints through torch.distributed.checkpoint: complete or absent, written while training goes on.

A checkpoint is written into a folder of its own, which gets its final name when the last byte is on disk. It holds each
rank's shard of weights and optimizer, the schedule, every rank's random state, and (state.json) what the controller
knows and the checksum of every file. A checkpoint that was cut short or changed later fails its checksum, and the one
before it is used instead.
"""

import json
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from titan_rl.config.io.bounded_files import read_json
from titan_rl.data.storage.shards import SHARDS, open_file, shards_of
from titan_rl.records.checkpoints.shard_store import ShardStore
from titan_rl.records.run_directory.rundir import RunDir, sync_path
from titan_rl.records.steps.step_names import step_name, steps_of

_STATE, _WRITING = "state.json", "writing-"
_BLOCK_BYTES = 16 << 20
_LEFTOVER = re.compile(r"writing-(\d{6,}-\d+|old-step-\d{6,})")
"""Folders that an interrupted save leaves behind."""
_Count = Annotated[int, Field(ge=0, le=10**12)]


@dataclass(frozen=True)
class ControllerState:
    """State of the controller in a checkpoint."""

    step: _Count
    """Steps done. The policy version and the ledger's mark have the same number."""
    stream_position: _Count
    held_out_before: dict[str, Any] | None
    """The evaluation before the first step, which a resumed run cannot repeat."""
    seconds_training: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CheckpointFolder:
    """The checkpoints of a run. Readers ask for the newest one that is complete. What is not ours is passed over."""

    def __init__(self, root: Path, keep_latest_k: int, store: ShardStore | None = None) -> None:
        """``store``: of the large files; None: they are beside the rest."""
        self.root, self.keep_latest_k, self._store = root, keep_latest_k, store

    @classmethod
    def of(cls, run_dir: RunDir, keep_latest_k: int, store: str = "") -> "CheckpointFolder":
        """Checkpoint folder of a run. ``store``: as ``checkpoint.store``."""
        named = ShardStore(store, run_dir.root.resolve().name) if store else None
        return cls(run_dir.checkpoints, keep_latest_k, named)

    def steps(self) -> list[int]:
        return steps_of(path.name for path in self.root.glob("step-*") if path.is_dir())

    def path(self, step: int) -> Path:
        return self.root / step_name(step)

    def begin(self, step: int) -> Path:
        """A new, empty folder to write into. What an interrupted save left behind is removed."""
        for leftover in self.root.glob("writing-*"):
            if _LEFTOVER.fullmatch(leftover.name) and leftover.is_dir():
                self.abandon(leftover)
        # a name of its own, since a writer that was given up may still run
        folder = self.root / f"writing-{step:06d}-{time.time_ns()}"
        folder.mkdir(parents=True)
        return folder

    def shards(self, folder: Path) -> str:
        """Place of the ranks' large files of a checkpoint in the making; empty: in its folder."""
        return "" if self._store is None else self._store.place(_name_in_store(folder))

    def gather(self, folder: Path) -> list[Path]:
        """Add files in the store to a checkpoint in the making. Returns its parts; none without a store."""
        return [] if self._store is None else self._store.gather(_name_in_store(folder), folder)

    def abandon(self, folder: Path) -> None:
        """Remove a folder that could not be written completely. Never raises."""
        with suppress(Exception):  # it is tried again when the next one is begun
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """With what belongs to it elsewhere, which goes first: a folder that is left still says where that is."""
        if self._store is not None:
            self._store.remove_of(folder)
            if folder.name.startswith(_WRITING):
                self._store.remove(_name_in_store(folder))
        shutil.rmtree(folder)

    def commit(self, folder: Path, state: ControllerState) -> Path:
        """The folder becomes the checkpoint of ``state.step``; older ones are removed only after that."""
        manifest = {"state": asdict(state), "files": {name: _described(folder, name) for name in _files(folder)}}
        (folder / _STATE).write_text(json.dumps(manifest | {"checksum": _digest(manifest)}))
        for path in (*(path for path in folder.rglob("*") if path.is_file()), folder):
            sync_path(path)
        place = self.path(state.step)
        aside = self._set_aside(place)
        folder.rename(place)
        sync_path(self.root)
        for step in self.steps()[: -self.keep_latest_k]:
            aside += self._set_aside(self.path(step))
        for old in aside:
            if old.is_dir():  # a file in a checkpoint's place was not ours
                self.abandon(old)
        return place

    def _set_aside(self, place: Path) -> list[Path]:
        """Renamed before it is removed, so that a half removed checkpoint is never found by its name."""
        if not place.exists():
            return []
        return [place.rename(self.root / f"writing-old-{place.name}")]

    def _manifest(self, step: int) -> tuple[ControllerState, dict[str, dict[str, Any]]]:
        """What the controller knew, and each file's size and checksum. Errors: ValueError that says what is wrong."""
        try:
            manifest = read_json(self.path(step) / _STATE)
            checksum = manifest.pop("checksum")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"its {_STATE} cannot be read ({type(error).__name__})") from None
        if _digest(manifest) != checksum:
            raise ValueError(f"its {_STATE} fails its checksum")
        return _checked_state(manifest.get("state"), step), _checked_files(manifest.get("files"))

    def flaw(self, step: int) -> str | None:
        """Flaw of a checkpoint, or None: every byte is read."""
        try:
            _, files = self._manifest(step)
            for part in {Path(name).parent for name in files}:
                shards = shards_of(self.path(step) / part)
                if shards is not None and not (self._store and self._store.owns(shards)):
                    return f"its files are in {shards.at!r:.200}, which is not below checkpoint.store"
            for name, expected in files.items():
                actual = _described(self.path(step), name)
                if actual["bytes"] != expected["bytes"]:
                    return f"its {name} has {actual['bytes']} bytes instead of {expected['bytes']}"
                if actual != expected:
                    return f"its {name} fails its checksum"
        except (ValueError, OSError) as error:
            return str(error)
        except Exception as error:  # a store's file system has errors of its own
            return f"{type(error).__name__}: {error}"
        return None

    def flaws(self) -> str:
        """Flaws of all checkpoints, as text."""
        return ", ".join(f"of step {step}, {self.flaw(step) or 'whole'}" for step in self.steps()) or "there is none"

    def newest_complete(
        self, at_most: int | None = None, log: Callable[[str], None] = lambda text: None
    ) -> tuple[Path, ControllerState] | None:
        """Newest complete checkpoint of a step up to ``at_most``, with its state. ``log`` gets a line for each that is
        skipped."""
        for step in reversed(self.steps()):
            if at_most is not None and step > at_most:
                continue
            if (flaw := self.flaw(step)) is None:
                return self.path(step), self._manifest(step)[0]
            log(f"checkpoint {self.path(step)} is not complete: {flaw}; trying the one before")
        return None

    def drop_after(self, step: int) -> None:
        """A run that continues from ``step`` makes the later ones again; the old ones stay, under other names."""
        for later in self.steps():
            if later > step:
                place = self.root / f"unused-{self.path(later).name}"
                if place.exists():
                    self.abandon(place)
                self.path(later).rename(place)


def _checked_state(content: Any, step: int) -> ControllerState:
    """Errors: ValueError unless it has the types of a state and belongs to that step."""
    try:
        state = TypeAdapter(ControllerState).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "state"
        raise ValueError(f"its {_STATE} says {where} = {first['input']!r:.60}: {first['msg']}") from None
    before = state.held_out_before or {"correct": 0, "count": 1}
    if not (_integer(before, "count") > 0 and 0 <= _integer(before, "correct") <= before["count"]):
        raise ValueError(f"its {_STATE} says held_out_before = {before!r:.60}")
    if state.step != step:
        raise ValueError(f"its {_STATE} is of step {state.step}")
    return state


def _integer(values: dict[str, Any], name: str) -> int:
    """-1 for what is no whole number."""
    return value if type(value := values.get(name)) is int else -1


def _checked_files(files: Any) -> dict[str, dict[str, Any]]:
    """Errors: ValueError unless it names files of the folder itself."""
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise ValueError(f"its {_STATE} lists no files")
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"its {_STATE} lists {name!r:.60}, which is not a file of it")
        if set(entry) != {"bytes", "xxh3_128"}:
            raise ValueError(f"its {_STATE} does not describe {name!r:.60}")
    return files


def _name_in_store(folder: Path) -> str:
    """Of one that was begun."""
    return folder.name.removeprefix(_WRITING)


def _files(folder: Path) -> list[str]:
    """What the trainers wrote, wherever it is, and what says where that is. Errors: StoreError."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {_STATE}
    parts = [Path(name).parent for name in names if Path(name).name == SHARDS]
    elsewhere: set[str] = set()
    for part in parts:
        shards = shards_of(folder / part)
        assert shards is not None, "its file was listed just now"
        elsewhere |= {(part / name).as_posix() for name in shards.sizes}
    return sorted(names | elsewhere)


def _described(folder: Path, name: str) -> dict[str, Any]:
    """Size and checksum of a file of a checkpoint."""
    checksum = xxhash.xxh3_128()
    path = folder / name
    with open_file(path.parent, path.name) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
        return {"bytes": file.tell(), "xxh3_128": checksum.hexdigest()}


def _digest(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
