"""Files that appear whole or not at all: written beside their place, then renamed into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file or a new folder to; when the block ends without an error, it takes the place of ``path``.

    A reader sees the old file or the new one, never half of either. After an error, what was written stays beside
    ``path``, and the next attempt writes over it. A folder can only take a place where there is none yet.
    """
    beside = path.with_name(f".{path.name}.writing")
    yield beside
    beside.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole of ``path``, in one step for a reader."""
    with replacing(path) as beside:
        beside.write_text(text)
