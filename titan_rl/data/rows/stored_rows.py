"""Rows in a temporary file of the process, made into objects when they are taken.

Memory holds some 40 bytes of a row, whatever its length: where it lies, and the facts that are asked of all rows at
once. A row that is taken again is made again, alike to the bit. The log-probabilities of tokens that no model sampled
are not stored: they are zeros.

Dimensions: R rows.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar, overload

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.examples import Example, label_of
from titan_rl.data.rows.row_shapes import ParsedRow
from titan_rl.data.rows.splits import QUESTION_BYTES, question_of
from titan_rl.data.storage.record_file import RecordFile
from titan_rl.data.types import Sample

T = TypeVar("T")
_JSON = json.JSONEncoder(ensure_ascii=False)


class StoredRows(Sequence[T], Generic[T]):
    """Rows of a record file, or some of them in an order; a slice is a view."""

    FACTS: np.dtype
    """Of each row, in memory."""

    def __init__(self, file: RecordFile, numbers_R: np.ndarray, facts_R: np.ndarray):
        """``numbers_R``: of the rows' records."""
        self._file, self._numbers_R, self._facts_R = file, numbers_R, facts_R

    @staticmethod
    def decode(record: bytes) -> T:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._numbers_R)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> T | Self:
        if isinstance(place, slice):
            return self.select(np.arange(len(self))[place])
        return self.decode(self._file.read(int(self._numbers_R[place])))

    def __iter__(self) -> Iterator[T]:
        return (self[place] for place in range(len(self)))

    def __add__(self, others: Sequence[T]) -> "Joined[T]":
        return Joined(self, others)

    def select(self, places: np.ndarray) -> Self:
        """View of the rows at these places, in their order."""
        return type(self)(self._file, self._numbers_R[places], self._facts_R[places])


class Joined(Sequence[T]):
    """Rows, and others behind them; a slice is a view."""

    def __init__(self, first: Sequence[T], second: Sequence[T]):
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> "Joined[T]": ...
    def __getitem__(self, place: int | slice) -> "T | Joined[T]":
        count = len(self._first)
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1
            first, second = self._first[start:stop], self._second[max(start - count, 0) : max(stop - count, 0)]
            return Joined(first, second)
        place = range(len(self))[place]
        return self._first[place] if place < count else self._second[place - count]


class RowWriter(Generic[T]):
    """Writes rows of a kind, one after another."""

    def __init__(self, kind: type[StoredRows[T]]):
        """Errors, here and below: ConfigError where the temporary file has no room."""
        self._kind, self._facts = kind, bytearray()
        try:
            self._file = RecordFile()
        except OSError as error:
            raise _no_room(error) from None

    def add(self, record: bytes, facts: bytes) -> None:
        """Add a row. ``facts``: as the kind's FACTS say."""
        self._facts += facts
        try:
            self._file.append(record)
        except OSError as error:
            raise _no_room(error) from None

    def rows(self) -> Any:
        """All rows, as ``kind`` has them. Nothing is added afterwards."""
        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from None
        return self._kind(self._file, np.arange(len(self._file)), np.frombuffer(self._facts, self._kind.FACTS))


def _no_room(error: OSError) -> ConfigError:
    return ConfigError(f"rows are kept in a temporary file, and {error}: set TMPDIR to a folder with room")


class ParsedRows(StoredRows[ParsedRow]):
    """Rows as they are read, before they are tokenized."""

    FACTS = np.dtype([("question", f"V{QUESTION_BYTES}"), ("has_messages", "?")])

    @property
    def questions(self) -> list[bytes]:
        """Digest of what each row asks (splits.py)."""
        return [question.tobytes() for question in self._facts_R["question"]]

    @property
    def have_messages(self) -> bool:
        """Whether an answer of any row is a list of messages."""
        return bool(self._facts_R["has_messages"].any())

    @staticmethod
    def decode(record: bytes) -> ParsedRow:
        return ParsedRow(**json.loads(record))


def encode_parsed(row: ParsedRow) -> tuple[bytes, bytes]:
    """Record and facts of a row, which is text, numbers, lists and tables, as JSON has them."""
    record = _JSON.encode(vars(row)).encode("utf-8", "surrogatepass")
    has_messages = any(not isinstance(answer, str) for answer in row.answers)
    return record, question_of(row.text) + bytes([has_messages])


# tokenized rows

_HEAD = struct.Struct("<iIII")
"""Source, number of samples, and bytes of the place and of what is asked."""
_SAMPLE = struct.Struct("<Iid")
"""Tokens, number, and what the row says of it."""
_EXAMPLE_FACTS = struct.Struct("<iiid")


class Examples(StoredRows[Example]):
    """Tokenized rows."""

    FACTS = np.dtype([("source", "<i4"), ("num_tokens", "<i4"), ("largest", "<i4"), ("label", "<f8")])

    @property
    def sources_R(self) -> np.ndarray:
        """Numbers of the rows' sources."""
        return self._facts_R["source"]

    @property
    def num_tokens_R(self) -> np.ndarray:
        return self._facts_R["num_tokens"]

    @property
    def largest_R(self) -> np.ndarray:
        """Largest token id of each row."""
        return self._facts_R["largest"]

    @property
    def labels_R(self) -> np.ndarray:
        """What each row says of its first answer (examples.label_of)."""
        return self._facts_R["label"]

    @staticmethod
    def decode(record: bytes) -> Example:
        source, num_samples, num_place, num_text = _HEAD.unpack_from(record)
        offset = _HEAD.size
        place = record[offset : (offset := offset + num_place)].decode("utf-8", "surrogatepass")
        text = record[offset : (offset := offset + num_text)].decode("utf-8", "surrogatepass")
        samples = []
        for _ in range(num_samples):
            length, number, advantage = _SAMPLE.unpack_from(record, offset)
            offset += _SAMPLE.size
            tokens = np.frombuffer(record, np.int32, length, offset).copy()
            provenance = np.frombuffer(record, np.int8, length, offset + tokens.nbytes).copy()
            offset += tokens.nbytes + provenance.nbytes
            samples.append(Sample(tokens, provenance, np.zeros(length, np.float32), advantage, place, number))
        return Example(place, text, tuple(samples), source)


class PackedExample(NamedTuple):
    """Example as it is stored, with what is asked of it before it is."""

    record: bytes
    facts: bytes
    place: str
    num_tokens: int
    longest: int
    """Tokens of its longest sample."""
    num_samples: int


def pack_example(example: Example) -> PackedExample:
    """Example of a data file as it is stored; ``Examples.decode`` is the way back."""
    place, text = (each.encode("utf-8", "surrogatepass") for each in (example.place, example.text))
    parts = [_HEAD.pack(example.source, len(example.samples), len(place), len(text)), place, text]
    for sample in example.samples:
        assert sample.tokens.dtype == np.int32 and sample.provenance.dtype == np.int8
        parts += [
            _SAMPLE.pack(len(sample.tokens), sample.sample, sample.advantage),
            sample.tokens.tobytes(),
            sample.provenance.tobytes(),
        ]
    largest = max(int(sample.tokens.max()) for sample in example.samples)
    longest = max(len(sample.tokens) for sample in example.samples)
    facts = _EXAMPLE_FACTS.pack(example.source, example.num_tokens, largest, label_of(example))
    return PackedExample(b"".join(parts), facts, example.place, example.num_tokens, longest, len(example.samples))
