"""The data of a run without a generator: read, checked, tokenized and split before anything starts. Pure.

A row that does not fit is an error that names it, or, by ``data.too_long = "skip"``, left out and listed; none is cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import DataConfig
from titan_rl.data.rows.examples import Example, make_example
from titan_rl.data.rows.row_files import RawRow, find_file, read_raw_rows
from titan_rl.data.rows.row_shapes import FORMATS, Kind, ParsedRow, read_row
from titan_rl.data.rows.splits import places_of, split_by_file, split_by_share
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

    train: list[Example]
    held_out: list[Example]
    too_long: tuple[TooLong, ...] = ()
    """Rows of either kind that were left out."""

    def draw(self, first: int, count: int, seed: int, stream: str = _SECTION) -> list[Example]:
        """Examples number ``first`` to ``first + count`` of the run: every row once an epoch, in a new order each.
        ``stream``: the name of the order."""
        return [self.train[place] for place in places_of(first, count, len(self.train), stream, seed)]


def read_files(settings: DataConfig, kind: Kind, folders: Sequence[str]) -> tuple[list[ParsedRow], list[ParsedRow]]:
    """Rows to train on, and held-out ones, of the files that ``[data]`` names. Errors: ConfigError."""
    check_format(settings, kind)
    rows = _read_file("file", settings.file, settings, kind, folders)
    if settings.held_out_file:
        held_out = _read_file("held_out_file", settings.held_out_file, settings, kind, folders)
        split = split_by_file(rows, held_out, _SECTION)
    else:
        split = split_by_share(rows, settings.held_out_share, _SECTION)
    return split.train, split.held_out


def check_format(settings: DataConfig, kind: Kind) -> None:
    """Check of ``data.format`` against the algorithm.

    Errors: ConfigError for a format that the algorithm cannot be trained on.
    """
    if settings.format != "auto" and settings.format not in FORMATS[kind]:
        valid = ", ".join(FORMATS[kind])
        raise ConfigError(f"data.format = {settings.format!r}: the algorithm trains on {kind}, so give auto or {valid}")


def _read_file(option: str, name: str, settings: DataConfig, kind: Kind, folders: Sequence[str]) -> list[ParsedRow]:
    path = find_file(f"{_SECTION}.{option}", name, folders, directories=True)
    return read_rows(path, read_raw_rows(path), settings, kind)


def read_rows(path: Path, rows: Iterable[RawRow], settings: DataConfig, kind: Kind) -> list[ParsedRow]:
    """Rows of a file, parsed. Errors: ConfigError that names the row."""
    try:
        parsed = [read_row(place, columns, kind, settings.format) for place, columns in rows]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not parsed:
        raise ConfigError(f"{path} holds no rows")
    return parsed


def make_dataset(
    train: list[ParsedRow],
    held_out: list[ParsedRow],
    settings: DataConfig,
    tokenizer: Tokenizer,
    *,
    row_tokens: int,
    sample_tokens: int,
    max_held_out: int,
) -> Dataset:
    """Dataset of tokenized rows.

    ``row_tokens``: the longest that an example may be, both answers of a pair together; ``sample_tokens``: one answer
    with its question. Errors: ConfigError that names a row that is longer, unless such rows are skipped; or if none is
    left.
    """
    count_train, count_held_out = len(train), min(len(held_out), max_held_out)
    examples = [make_example(row, tokenizer, as_chat=settings.chat) for row in (*train, *held_out[:max_held_out])]
    fitting = [_fits(example, settings, row_tokens, sample_tokens) for example in examples]
    kept = [
        [example for example, fits in zip(examples[part], fitting[part], strict=True) if fits]
        for part in (slice(0, count_train), slice(count_train, None))
    ]
    for what, examples_kept, count in (("", kept[0], count_train), ("held-out ", kept[1], count_held_out)):
        if not examples_kept:
            raise ConfigError(f"all {count} {what}rows are longer than training.seq_len = {row_tokens}: raise it")
    too_long = [
        TooLong(example.place, example.num_tokens, is_held_out=number >= count_train)
        for number, (example, fits) in enumerate(zip(examples, fitting, strict=True))
        if not fits
    ]
    return Dataset(*kept, too_long=tuple(too_long))


def _fits(example: Example, settings: DataConfig, row_tokens: int, sample_tokens: int) -> bool:
    longest = max(len(sample.tokens) for sample in example.samples)
    if example.num_tokens <= row_tokens and longest <= sample_tokens:
        return True
    if settings.too_long == "skip":
        return False
    both = " (both answers of a pair stand in one)" if len(example.samples) > 1 else ""
    if longest > sample_tokens and longest <= row_tokens:
        raise ConfigError(
            f"{example.place}: {longest} tokens are more than the model's {sample_tokens} positions: leave the row "
            f"out, or set data.too_long = 'skip' to leave out all such rows"
        )
    raise ConfigError(
        f"{example.place}: {example.num_tokens} tokens do not fit into a row of training.seq_len = {row_tokens}{both}: "
        f"raise it, leave the row out, or set data.too_long = 'skip' to leave out all such rows"
    )
