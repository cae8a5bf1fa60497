"""The data of a run without a generator: read, checked, tokenized and split before anything starts. Pure.

A row that does not fit is an error that names it, or, by ``data.too_long = "skip"``, left out and listed; none is cut.
Rows lie in temporary files, parsed and then tokenized, and never all in memory (stored_rows.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import DataConfig
from titan_rl.data.rows.column_names import check_learned_names, with_names, with_same
from titan_rl.data.rows.examples import Example, make_example
from titan_rl.data.rows.file_sources import Source, check_unweighted, list_names, locate_sources, read_sources
from titan_rl.data.rows.public_shapes import as_example
from titan_rl.data.rows.row_files import RawRow
from titan_rl.data.rows.row_shapes import FORMATS, Kind, ParsedRow, read_row
from titan_rl.data.rows.splits import RowOrder, row_order, sides_by_file, sides_by_share
from titan_rl.data.rows.stored_rows import (
    Examples,
    PackedExample,
    ParsedRows,
    RowWriter,
    encode_parsed,
    pack_example,
)
from titan_rl.data.text.tokenizer import Tokenizer

_SECTION = "data"


@dataclass(frozen=True)
class TooLong:
    """A row that was left out."""

    place: str
    num_tokens: int
    """Of its samples, in one row."""
    is_held_out: bool


@dataclass(frozen=True)
class Dataset:
    """Training and held-out examples of a run."""

    train: Examples
    held_out: Examples
    too_long: tuple[TooLong, ...] = ()
    """Rows of either kind that were left out."""
    sources: tuple[Source, ...] = ()
    """Sources of the training rows; empty: all are of one."""
    num_overlapping: int = 0
    """Training rows that were left out, since a held-out one asks the same."""

    @cached_property
    def _order(self) -> RowOrder:
        return order_of(self.train.sources_R, self.sources)

    def draw(self, first: int, count: int, seed: int, stream: str = _SECTION) -> list[Example]:
        """Examples number ``first`` to ``first + count`` of the run: every row of a source once an epoch, in a new
        order each. ``stream``: the name of the order."""
        return [self.train[place] for place in self._order.places(first, count, stream, seed)]

    def good(self) -> "Dataset":
        """Training rows whose first answer is chosen or desirable, of all sources alike."""
        good = self.train.select(np.flatnonzero(self.train.labels_R >= 0))
        return Dataset(good, self.held_out.select(np.arange(0)))


@dataclass(frozen=True)
class FileRows:
    """Rows to train on, and held-out ones, before they are tokenized."""

    train: ParsedRows
    held_out: ParsedRows
    sources: tuple[Source, ...] = ()
    num_overlapping: int = 0
    """Of the training rows, as in a Dataset."""


def read_files(settings: DataConfig, kind: Kind, folders: Sequence[str]) -> FileRows:
    """Rows of the files that ``[data]`` names. Errors: ConfigError."""
    check_format(settings, kind)
    check_learned_names(f"{_SECTION}.columns", settings.columns, kind)
    sources = locate_sources(f"{_SECTION}.file", settings.file, folders)
    rows = read_rows(sources, settings, kind)
    if settings.held_out_file:
        setting = f"{_SECTION}.held_out_file"
        check_unweighted(setting, settings.held_out_file)
        held_out = read_rows(locate_sources(setting, settings.held_out_file, folders), settings, kind)
        sides = sides_by_file(rows.questions, held_out.questions, _SECTION)
        train = rows.select(sides.train)
        return FileRows(train, held_out, tuple(sources), len(rows) - len(train))
    sides = sides_by_share(rows.questions, settings.held_out_share, rows[0].place, _SECTION)
    return FileRows(rows.select(sides.train), rows.select(sides.held_out), tuple(sources))


def order_of(sources_R: np.ndarray, sources: Sequence[Source]) -> RowOrder:
    """Order of training rows.

    ``sources_R``: the number of each row's source. Errors: ConfigError for a weighted source without a row.
    """
    weights, names = [source.weight for source in sources], [source.name for source in sources]
    return row_order(sources_R, weights or [None], names, _SECTION)


def check_format(settings: DataConfig, kind: Kind) -> None:
    """Check of ``data.format`` against the algorithm.

    Errors: ConfigError for a format that the algorithm cannot be trained on.
    """
    if settings.format != "auto" and settings.format not in FORMATS[kind]:
        valid = ", ".join(FORMATS[kind])
        raise ConfigError(f"data.format = {settings.format!r}: the algorithm trains on {kind}, so give auto or {valid}")


def read_rows(sources: Sequence[Source], settings: DataConfig, kind: Kind) -> ParsedRows:
    """Rows of all sources, parsed. Errors: ConfigError that names the row."""
    try:
        parsed = (replace(_parsed(row, settings, kind), source=number) for number, row in read_sources(sources))
        rows = store_rows(parsed)
    except OSError as error:
        raise ConfigError(f"cannot read {list_names(sources)}: {error}") from None
    if not rows:
        raise ConfigError(f"{', '.join(str(path) for source in sources for path in source.paths)} holds no rows")
    return rows


def store_rows(parsed: Iterable[ParsedRow]) -> ParsedRows:
    """Parsed rows, out of memory. Errors: ConfigError."""
    writer = RowWriter(ParsedRows)
    for row in parsed:
        writer.add(*encode_parsed(row))
    return writer.rows()


def _parsed(row: RawRow, settings: DataConfig, kind: Kind) -> ParsedRow:
    place, columns = row
    columns = with_names(place, columns, settings.columns, f"{_SECTION}.columns")
    columns, mapped = with_same(columns, settings.columns)
    if settings.format == "auto":
        columns = as_example(place, columns, kind, mapped)
    return read_row(place, columns, kind, settings.format, mapped)


def make_dataset(
    rows: FileRows,
    settings: DataConfig,
    tokenizer: Tokenizer,
    *,
    row_tokens: int,
    sample_tokens: int,
    max_held_out: int,
    map_rows: Callable[[Callable[[ParsedRow], PackedExample], Sequence[ParsedRow]], Iterable[PackedExample]] = map,
) -> Dataset:
    """Dataset of tokenized rows.

    ``row_tokens``: the longest that an example may be, both answers of a pair together; ``sample_tokens``: one answer
    with its question; ``map_rows``: on whichever processes. Errors: ConfigError that names a row that is longer, unless
    such rows are skipped; or if none is left.
    """
    held_out = rows.held_out[:max_held_out]
    make = partial(_packed, tokenizer=tokenizer, as_chat=settings.chat)
    writer, too_long, error = RowWriter(Examples), [], None
    for number, packed in enumerate(map_rows(make, rows.train + held_out)):
        try:
            fits = _fits(packed, settings, row_tokens, sample_tokens)
        except ConfigError as refused:
            error = error or refused  # raised below, behind those of rows that cannot be tokenized
            continue
        if fits:
            writer.add(packed.record, packed.facts)
        else:
            too_long.append(TooLong(packed.place, packed.num_tokens, is_held_out=number >= len(rows.train)))
    if error is not None:
        raise error
    examples, count = writer.rows(), len(rows.train) - sum(not each.is_held_out for each in too_long)
    kept = examples[:count], examples[count:]
    for what, examples_kept, given in (("", kept[0], rows.train), ("held-out ", kept[1], held_out)):
        if not examples_kept:
            raise ConfigError(f"all {len(given)} {what}rows are longer than training.seq_len = {row_tokens}: raise it")
    order_of(kept[0].sources_R, rows.sources)
    return Dataset(*kept, too_long=tuple(too_long), sources=rows.sources, num_overlapping=rows.num_overlapping)


def _packed(row: ParsedRow, tokenizer: Tokenizer, *, as_chat: bool) -> PackedExample:
    return pack_example(make_example(row, tokenizer, as_chat=as_chat))


def _fits(example: PackedExample, settings: DataConfig, row_tokens: int, sample_tokens: int) -> bool:
    longest = example.longest
    if example.num_tokens <= row_tokens and longest <= sample_tokens:
        return True
    if settings.too_long == "skip":
        return False
    both = " (both answers of a pair stand in one)" if example.num_samples > 1 else ""
    if longest > sample_tokens and longest <= row_tokens:
        raise ConfigError(
            f"{example.place}: {longest} tokens are more than the model's {sample_tokens} positions: leave the row "
            f"out, or set data.too_long = 'skip' to leave out all such rows"
        )
    raise ConfigError(
        f"{example.place}: {example.num_tokens} tokens do not fit into a row of training.seq_len = {row_tokens}{both}: "
        f"raise it, leave the row out, or set data.too_long = 'skip' to leave out all such rows"
    )
