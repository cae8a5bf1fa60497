"""Training and held-out rows, split by their question, and the order of an epoch.

Pure.

A row stays on its side whatever other rows come, and no training row asks what a held-out one asks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import gcd, lcm
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.seeds import named_seed

_POSITION_BYTES, _OWN_BYTES = 6, 16
QUESTION_BYTES = _POSITION_BYTES + _OWN_BYTES
"""Of the digest of what a row asks."""


class Asking(Protocol):
    """A row that asks something."""

    @property
    def place(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def question_key(self) -> str: ...


T = TypeVar("T", bound=Asking)


@dataclass(frozen=True)
class Split(Generic[T]):
    train: list[T]
    held_out: list[T]
    held_out_questions: frozenset[bytes]
    num_overlapping: int = 0
    """Rows that are on neither side, since a held-out one asks the same."""


class Sides(NamedTuple):
    """Places of the rows on each side."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_questions: frozenset[bytes]


def key(text: str) -> str:
    """Key of equal prompts: their words, however they are spaced."""
    return " ".join(text.split())


def question_of(text: str) -> bytes:
    """Digest of a prompt: alike for prompts of equal keys, and ordered as they are held out."""
    data = key(text).encode("utf-8", "surrogatepass")
    return b"".join(hashlib.blake2b(data, digest_size=size).digest() for size in (_POSITION_BYTES, _OWN_BYTES))


def _position(question: bytes) -> float:
    """Of a question between 0 and 1, by its hash."""
    return int.from_bytes(question[:_POSITION_BYTES], "big") / 2 ** (8 * _POSITION_BYTES)


def split_by_share(rows: Sequence[T], share: float, section: str) -> Split[T]:
    """About that share of the texts is held out, at least one, and at least one is not.

    A row stays on its side when others are added. ``section``: where the settings are, for messages. Errors:
    ConfigError if all rows have the same text.
    """
    sides = sides_by_share(_questions(rows), share, rows[0].place, section)
    return Split(_at(rows, sides.train), _at(rows, sides.held_out), sides.held_out_questions)


def split_by_file(rows: Sequence[T], held_out: Sequence[T], section: str) -> Split[T]:
    """Rows with the text of a held-out one are left out. Errors: ConfigError if no row is left."""
    sides = sides_by_file(_questions(rows), _questions(held_out), section)
    train = _at(rows, sides.train)
    return Split(train, _at(held_out, sides.held_out), sides.held_out_questions, len(rows) - len(train))


def _questions(rows: Sequence[Asking]) -> list[bytes]:
    return [question_of(row.question_key) for row in rows]


def _at(rows: Sequence[T], places: np.ndarray) -> list[T]:
    return [rows[place] for place in places]


def sides_by_share(questions: Sequence[bytes], share: float, first: str, section: str) -> Sides:
    """Sides of rows by their questions, as ``split_by_share`` has it. ``first``: place of the first row."""
    distinct = sorted(set(questions))
    if len(distinct) < 2:
        raise ConfigError(
            f"the data file holds one question only, {first}: none is left for training once it is held out; "
            f"add others, or set {section}.held_out_file"
        )
    count = sum(_position(each) < share for each in distinct)
    held_out = frozenset(distinct[: min(max(count, 1), len(distinct) - 1)])
    is_held_out = _are_in(questions, held_out)
    return Sides(np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out), held_out)


def sides_by_file(questions: Sequence[bytes], held_out: Sequence[bytes], section: str) -> Sides:
    """Sides of rows and of those of a held-out file, as ``split_by_file`` has it."""
    asked = frozenset(held_out)
    train = np.flatnonzero(~_are_in(questions, asked))
    if not len(train):
        raise ConfigError(f"every row of {section}.file is in {section}.held_out_file too: nothing to train on")
    return Sides(train, np.arange(len(held_out)), asked)


def _are_in(questions: Sequence[bytes], some: frozenset[bytes]) -> np.ndarray:
    return np.fromiter((question in some for question in questions), bool, len(questions))


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


# weighted sources


_ROUND = 1000
"""Most draws of a round."""


@dataclass(frozen=True)
class RowOrder:
    """Order in which the rows of several sources are drawn, which stand one source after another.

    Without ``draws`` all rows are alike. With them a round has so many draws of each source, in a seeded order, and
    each source goes through its own rows epoch by epoch.
    """

    sizes: tuple[int, ...]
    """Rows of each source."""
    draws: tuple[int, ...] = ()
    """Draws of each source in a round."""

    def places(self, first: int, count: int, stream: str, seed: int) -> list[int]:
        """Rows number ``first`` to ``first + count`` of a stream, a function of these numbers alone."""
        if not self.draws:
            return places_of(first, count, sum(self.sizes), stream, seed)
        return [self._place(number, stream, seed) for number in range(first, first + count)]

    def _place(self, number: int, stream: str, seed: int) -> int:
        rounds, place = divmod(number, sum(self.draws))
        order = _round_order(self.draws, stream, seed, rounds)
        source = int(order[place])
        drawn = rounds * self.draws[source] + int((order[:place] == source).sum())
        [row] = places_of(drawn, 1, self.sizes[source], f"{stream} {source}", seed)
        return [0, *accumulate(self.sizes)][source] + row


@lru_cache(maxsize=8)
def _round_order(draws: tuple[int, ...], stream: str, seed: int, number: int) -> np.ndarray:
    """Source of each draw of a round."""
    sources = np.repeat(np.arange(len(draws)), draws)
    return np.random.RandomState(named_seed("sources", stream, seed, number) % 2**32).permutation(sources)


def row_order(
    sources: Sequence[int] | np.ndarray, weights: Sequence[float | None], names: Sequence[str], section: str
) -> RowOrder:
    """Order of rows by their sources.

    ``sources``: the number of each row's source. ``weights``, ``names``: of the sources. Errors: ConfigError for a
    weighted source without a row.
    """
    counts = np.bincount(np.asarray(sources, np.int64), minlength=len(weights)).tolist()
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights) or not given:
        return RowOrder(tuple(counts))
    if empty := next((name for name, count in zip(names, counts, strict=True) if not count), None):
        raise ConfigError(
            f"{section}.file: no row of {empty} is left to train on, so its weight cannot be kept: leave it out, or "
            f"hold out fewer rows"
        )
    return RowOrder(tuple(counts), draws_of(given))


def draws_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each source in a round: the weights' own ratio where a round of 1,000 holds it, else the nearest."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(each.denominator for each in fractions))
    whole = [int(each * common) for each in fractions]
    whole = [each // gcd(*whole) for each in whole]
    if sum(whole) <= _ROUND:
        return tuple(whole)
    total = sum(fractions)
    return tuple(max(1, round(_ROUND * each / total)) for each in fractions)
