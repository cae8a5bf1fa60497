"""Collection of people's judgements: a folder with its settings, its items and the journal, and who is asked what.

    collection.json   mode, seed, judgements wanted, and what the items were made of
    items.jsonl       what is judged (items.py)
    judgements.jsonl  the journal
    preferences.jsonl, labels.jsonl, edits.jsonl    rows to train on (rows.py)

Each labeller goes through the items in an order of their own. An item is open to a labeller who has not judged it until
it has as many judgements as are wanted. Planted items are mixed in, of everybody in proportion to the other ones.
"""

import fcntl
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError
from titan_rl.data.seeds import named_seed
from titan_rl.data.storage.files import replace_text
from titan_rl.records.preferences.items import CHOICES, Item, Mode, read_items, write_items
from titan_rl.records.preferences.journal import Journal, Latest, latest, read_journal
from titan_rl.records.preferences.judgements import Judgement, RefusedJudgement, folded, order_of, own_choice
from titan_rl.records.preferences.rows import FILES
from titan_rl.records.run_directory.path_checks import check_own, check_place
from titan_rl.records.run_directory.rundir import sync_path

MOST_LABELLERS, MOST_CHANGES = 100, 20
"""Of a collection; of one labeller's mind about one item."""
ITEMS = "items.jsonl"
_SETTINGS, _JOURNAL, _LOCK = "collection.json", "judgements.jsonl", "lock"
_WRITING = {f".{name}.writing" for name in (_SETTINGS, ITEMS, *FILES)}
_BEGUN = {ITEMS, *_WRITING}
"""Files before the settings, which are written last."""


@dataclass(frozen=True)
class Settings:
    """Settings of a collection."""

    mode: Mode
    seed: int
    wanted: int
    """Judgements of each item."""
    source: dict[str, Any]
    """What the items were made of, to tell a collection from another."""


def is_collection(folder: Path) -> bool:
    return os.path.isfile(folder / _SETTINGS)  # says no to a name that is too long


def check_folder(folder: Path, *, write: bool) -> None:
    """Check of a collection's place. Errors: ConfigError, also for links in it that lead elsewhere."""
    check_place(folder, write=write, what="collection")
    check_own(folder, (_SETTINGS, ITEMS, _JOURNAL, _LOCK, *FILES, *_WRITING), (), what="collection")


def check_new(folder: Path) -> None:
    """Check of a new collection's place, where another start may have been killed. Errors: ConfigError."""
    check_folder(folder, write=True)
    if folder.exists() and not {path.name for path in folder.iterdir()} <= _BEGUN:
        raise ConfigError(f"{folder} is not empty and no collection: give another --out")


def create(folder: Path, settings: Settings, items: Sequence[Item]) -> None:
    """Write a new collection: it is one as soon as all items are on disk. Errors: ConfigError; DiskFull."""
    check_new(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; give another --out") from None
    write_items(folder / ITEMS, items)
    _write_settings(folder, settings)


def _write_settings(folder: Path, settings: Settings) -> None:
    replace_text(folder / _SETTINGS, json.dumps(asdict(settings), indent=2) + "\n")
    sync_path(folder / _SETTINGS)
    sync_path(folder)


def read_settings(folder: Path) -> Settings:
    """Errors: ConfigError for what is no collection."""
    try:
        fields = read_json(folder / _SETTINGS)
        settings = Settings(**fields)
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{folder} is no collection: {why}; give a folder that titan-rl collect made") from None
    are_counts = all(type(each) is int and 0 <= each < 1 << 31 for each in (settings.seed, settings.wanted))
    if settings.mode not in tuple(CHOICES) or not are_counts or not settings.wanted:
        raise ConfigError(f"{folder / _SETTINGS} holds no settings of a collection: restore it")
    if not isinstance(settings.source, dict):
        raise ConfigError(f"{folder / _SETTINGS} does not say what was collected: restore it")
    return settings


@dataclass(frozen=True)
class Record:
    """Content of a collection, to read."""

    settings: Settings
    items: list[Item]
    judgements: list[Judgement]


def read_collection(folder: Path) -> Record:
    """Collection that somebody may be writing. Errors: ConfigError."""
    check_folder(folder, write=False)
    settings = read_settings(folder)
    try:
        items = read_items(folder / ITEMS, settings.mode)
        judgements = read_journal(folder / _JOURNAL, CHOICES[settings.mode])
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}; give a folder that titan-rl collect made") from None
    _check_known(folder, items, judgements)
    return Record(settings, items, judgements)


def _check_known(folder: Path, items: Sequence[Item], judgements: Sequence[Judgement]) -> None:
    known = {item.id for item in items}
    if unknown := next((judgement.item for judgement in judgements if judgement.item not in known), None):
        raise ConfigError(f"{folder} has a judgement of item {unknown}, which it has not: restore {ITEMS}")


@dataclass(frozen=True)
class Assignment:
    """Next item of a labeller."""

    item: Item
    shown: tuple[int, ...]
    """Order of its answers."""


class Collection:
    """The owner of an open collection. Any thread may call it."""

    def __init__(self, folder: Path, wanted: int | None = None) -> None:
        """Open a collection, for one process. ``wanted``: another number of judgements from now on.

        Errors: ConfigError if another process has it, or it is damaged."""
        check_folder(folder, write=True)
        settings = read_settings(folder)
        self.folder, self._lock_file = folder, lock(folder)
        if wanted is not None and wanted != settings.wanted:
            settings = replace(settings, wanted=wanted)
            _write_settings(folder, settings)
        self.settings = settings
        try:
            self.items = {item.id: item for item in read_items(folder / ITEMS, settings.mode)}
            self._journal = Journal(folder / _JOURNAL, CHOICES[settings.mode])
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error.strerror}; give another --out") from None
        _check_known(folder, list(self.items.values()), self._journal.judgements)
        self._mutex, self._is_closed = threading.Lock(), False
        self._ids = {judgement.id: judgement for judgement in self._journal.judgements}
        self._changes = Counter((each.item, each.who) for each in self._journal.judgements)
        self._latest: Latest = latest(self._journal.judgements)
        self._counts = Counter(item for item, _ in self._latest)
        self._sequences: dict[str, list[str]] = {}
        self._names: dict[str, str] = {}
        for judgement in self._journal.judgements:
            self._names.setdefault(folded(judgement.who), judgement.who)

    def spelling(self, who: str) -> tuple[str, bool]:
        """A labeller's name as it was first written, and whether it was judged under before."""
        with self._mutex:
            return self._spelling(who), folded(who) in self._names

    def next_item(self, who: str) -> Assignment | None:
        """Next open item of a labeller; None if all is done."""
        with self._mutex:
            ordinary, planted = self._open_items(who)
            left = len(ordinary) + len(planted)
            if not left:
                return None
            draw = named_seed("planted", self.settings.seed, who, self._done(who)) % left
            item = (planted if draw < len(planted) else ordinary)[0]
        return Assignment(item, self._shown(item.id, who))

    def progress(self, who: str) -> tuple[int, int]:
        """Items that a labeller has judged, and those that are open to them."""
        with self._mutex:
            return self._done(who), sum(map(len, self._open_items(who)))

    def judge(self, judgement: Judgement) -> Judgement:
        """Record a judgement of the answers as they were shown; when this comes back it is on disk, once.

        Errors: RefusedJudgement; DiskFull, OSError: it is not recorded."""
        if judgement.item not in self.items:
            raise RefusedJudgement(f"there is no item {judgement.item}: load the page again")
        if judgement.edit and self.items[judgement.item].editable is None:
            raise RefusedJudgement(f"item {judgement.item} has no answer to edit: load the page again")
        with self._mutex:
            if self._is_closed:
                raise RefusedJudgement("the page has ended: begin it again")
            who = self._spelling(judgement.who)
            shown = self._shown(judgement.item, who)
            choice = own_choice(judgement.choice, shown)
            own = replace(judgement, who=who, shown=shown, choice=choice, time=time.time())
            if (known := self._ids.get(own.id)) is None:
                self._record(own)
            elif not own.repeats(known):
                raise RefusedJudgement("this id is of another judgement: send a new one")
        return own

    def _record(self, judgement: Judgement) -> None:
        self._check_room(judgement)
        self._journal.append(judgement)
        key = (judgement.item, judgement.who)
        self._ids[judgement.id] = judgement
        self._changes[key] += 1
        self._counts[judgement.item] += key not in self._latest
        self._latest[key] = judgement
        self._names.setdefault(folded(judgement.who), judgement.who)

    def _check_room(self, judgement: Judgement) -> None:
        if folded(judgement.who) not in self._names and len(self._names) >= MOST_LABELLERS:
            raise RefusedJudgement(f"{MOST_LABELLERS} labellers have judged already: take one of their names")
        if self._changes[judgement.item, judgement.who] >= MOST_CHANGES:
            raise RefusedJudgement(f"this item was judged {MOST_CHANGES} times by {judgement.who}: go on")

    def _spelling(self, who: str) -> str:
        return self._names.get(folded(who), who)

    def _done(self, who: str) -> int:
        return sum(labeller == who for _, labeller in self._latest)

    def _open_items(self, who: str) -> tuple[list[Item], list[Item]]:
        """Ordinary and planted items that are open to a labeller, in their order: of the planted ones the same share as
        of the others, so that nobody is asked planted ones alone."""
        items = [self.items[name] for name in self._sequence(who)]
        judged = Counter(bool(item.planted) for item in items if (item.id, who) in self._latest)
        left = [item for item in items if (item.id, who) not in self._latest]
        ordinary = [item for item in left if not item.planted and self._counts[item.id] < self.settings.wanted]
        planted = [item for item in left if item.planted]
        num_planted = len(planted) + judged[True]
        share = Fraction(judged[False] + len(ordinary), max(len(items) - num_planted, 1))
        return ordinary, planted[: max(math.ceil(num_planted * share) - judged[True], 0)]

    def _sequence(self, who: str) -> list[str]:
        if who not in self._sequences:
            if len(self._sequences) >= MOST_LABELLERS:
                self._sequences.clear()  # names that only looked
            seed = self.settings.seed
            self._sequences[who] = sorted(self.items, key=lambda name: named_seed("sequence", seed, who, name))
        return self._sequences[who]

    def _shown(self, name: str, who: str) -> tuple[int, ...]:
        return order_of(self.settings.seed, name, who, self.settings.mode)

    def close(self) -> None:
        """Release it; a request that is still under way is refused."""
        with self._mutex:
            self._is_closed = True
            self._journal.close()
            self._lock_file.close()


class Served(ConfigError):
    """Collection that another process serves."""


def lock(folder: Path) -> IO[str]:
    """Hold a collection for this process, until it is closed. Errors: Served; ConfigError."""
    try:
        held = open(folder / _LOCK, "w")  # noqa: SIM115  (held until it is closed, or the process ends)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Served(f"{folder} is served by another process: use its page, or end it first") from None
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}; give another --out") from None
    return held
