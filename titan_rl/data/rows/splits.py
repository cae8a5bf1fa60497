"""Training and held-out rows, split by their question, and the order of an epoch.

Pure.

A row stays on its side whatever other rows come, and no training row asks what a held-out one asks.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.seeds import named_seed


class Asking(Protocol):
    """A row that asks something."""

    @property
    def place(self) -> str: ...

    @property
    def text(self) -> str: ...


T = TypeVar("T", bound=Asking)


@dataclass(frozen=True)
class Split(Generic[T]):
    train: list[T]
    held_out: list[T]
    held_out_keys: frozenset[str]


def key(text: str) -> str:
    """Key of equal prompts: their words, however they are spaced."""
    return " ".join(text.split())


def _position(key: str) -> float:
    """Of a text between 0 and 1, by its hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def split_by_share(rows: Sequence[T], share: float, section: str) -> Split[T]:
    """About that share of the texts is held out, at least one, and at least one is not.

    A row stays on its side when others are added. ``section``: where the settings are, for messages. Errors:
    ConfigError if all rows have the same text.
    """
    keys = sorted({key(row.text) for row in rows}, key=_position)
    if len(keys) < 2:
        raise ConfigError(
            f"the data file holds one question only, {rows[0].place}: none is left for training once it is held out; "
            f"add others, or set {section}.held_out_file"
        )
    count = sum(_position(each) < share for each in keys)
    return _split(rows, rows, frozenset(keys[: min(max(count, 1), len(keys) - 1)]))


def split_by_file(rows: Sequence[T], held_out: Sequence[T], section: str) -> Split[T]:
    """Rows with the text of a held-out one are left out. Errors: ConfigError if no row is left."""
    split = _split(rows, held_out, frozenset(key(row.text) for row in held_out))
    if not split.train:
        raise ConfigError(f"every row of {section}.file is in {section}.held_out_file too: nothing to train on")
    return split


def _split(rows: Iterable[T], candidates: Iterable[T], keys: frozenset[str]) -> Split[T]:
    train = [row for row in rows if key(row.text) not in keys]
    return Split(train, [row for row in candidates if key(row.text) in keys], keys)


@lru_cache(maxsize=8)
def epoch_order(num_rows: int, stream: str, seed: int, epoch: int) -> np.ndarray:
    """The rows' order in one epoch. RandomState, as no later numpy may change what it draws."""
    return np.random.RandomState(named_seed("rows", stream, seed, epoch) % 2**32).permutation(num_rows)


def places_of(first: int, count: int, num_rows: int, stream: str, seed: int) -> list[int]:
    """Rows number ``first`` to ``first + count`` of a stream that goes through all rows, epoch by epoch.

    A function of these numbers alone: a run that goes on in the middle of an epoch repeats none and leaves out none.
    """
    numbers = (divmod(number, num_rows) for number in range(first, first + count))
    return [int(epoch_order(num_rows, stream, seed, epoch)[place]) for epoch, place in numbers]
