"""Files that a reader never meets half written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; when the block ends well, what is there takes ``path``'s place."""
    beside = path.with_name(f".{path.name}.writing")
    yield beside
    beside.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole of ``path``, in one step for whoever reads it."""
    with replacing(path) as beside:
        beside.write_text(text)
