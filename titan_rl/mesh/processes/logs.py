"""What an actor process prints goes to a file of its own, so that the terminal stays the controller's."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def log_file(folder: str | None, name: str) -> Iterator[TextIO]:
    """Open log file for a child's output: ``folder/name.txt``, or /dev/null."""
    with open(Path(folder) / f"{name}.txt" if folder else os.devnull, "a") as file:
        yield file


def write_each_line() -> None:
    """Write standard output line by line from now on, in forks too: one that is killed loses no line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def send_output_to(folder: str | None, name: str) -> None:
    """From now on this process and its children write to ``folder/name.txt``, if there is a folder, line by line."""
    write_each_line()
    if folder is None:
        return
    descriptor = os.open(Path(folder) / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
