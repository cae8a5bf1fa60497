"""A function over many items on all cores, by forked processes, with a line of progress every ten seconds.

What it returns, and which error it raises, is what one process would: results come in order, and so does the first
item that fails. Few items are done here, without any process.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from titan_rl.config.io.printable import say
from titan_rl.mesh.processes.logs import write_each_line
from titan_rl.mesh.resources.cores import available_cores

_ALONE_SECONDS = 3.0
"""Of work that is done here before processes are forked for what is left."""
_WORTH_SECONDS = 2.0
"""Of work that is left, for which they are."""
_CHUNK = 256
"""Items that a process sends the results of at once."""
_CHUNK_SECONDS = 1800.0
"""Within which it must, or it hangs."""
_LINE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_PARALLELISM = "TOKENIZERS_PARALLELISM"

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item], what: str) -> Iterator[Result]:
    """Results in order. ``what``: what is done, for the lines of progress, as in ``tokenizing rows``.

    Errors: whatever the function raises; ChildProcessError for a process that was killed, or hangs.
    """
    progress = _Progress(what, len(items))
    begin = time.monotonic()
    for number, item in enumerate(items):
        seconds = time.monotonic() - begin
        if seconds > _ALONE_SECONDS and seconds * (len(items) - number) > _WORTH_SECONDS * number:
            yield from _by_processes(function, items[number:], progress)
            return
        yield function(item)
        progress.add(1)


class _Progress:
    """How far the work is, told to stderr."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self._total, self._done = what, total, 0
        self._begin = self._last = time.monotonic()

    def add(self, num_done: int) -> None:
        self._done += num_done
        now = time.monotonic()
        if now - self._last < _LINE_SECONDS:
            return
        self._last = now
        left = (now - self._begin) / self._done * (self._total - self._done)
        say(f"{self.what}: {self._done:,} of {self._total:,}, about {left:.0f} s left", file=sys.stderr)


def _by_processes(function: Callable[[Any], Any], items: Sequence[Any], progress: _Progress) -> Iterator[Any]:
    """Chunk number i is the work of process i modulo their number, so that each is read from in turn."""
    chunks = [range(start, min(start + _CHUNK, len(items))) for start in range(0, len(items), _CHUNK)]
    num_processes = min(available_cores(), len(chunks))
    with ExitStack() as stack:
        readers = [
            stack.enter_context(_forked(function, items, chunks[number::num_processes]))
            for number in range(num_processes)
        ]
        for number, chunk in enumerate(chunks):
            reader = readers[number % num_processes]
            try:
                if not reader.poll(_CHUNK_SECONDS):
                    raise ChildProcessError(f"{progress.what}: a process has been silent for {_CHUNK_SECONDS:.0f} s")
                results, error = reader.recv()
            except EOFError:
                raise ChildProcessError(f"{progress.what}: a process was killed, for want of memory?") from None
            yield from results
            if error is not None:
                raise error
            progress.add(len(chunk))


@contextmanager
def _forked(function: Callable[[Any], Any], items: Sequence[Any], chunks: Sequence[range]) -> Iterator[Any]:
    """Connection to a process that works on these chunks; it is gone at the end."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(os.getpid(), writer, function, items, chunks), daemon=True)
    with _without_threads():
        process.start()
    writer.close()  # so that its end is an end here, and no later process holds it
    try:
        yield reader
    finally:
        process.kill()
        process.join()
        reader.close()


@contextmanager
def _without_threads() -> Iterator[None]:
    """A tokenizer that has used threads, and is forked, says so unless it is told to use none."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _work(
    parent: int, writer: Connection, function: Callable[[Any], Any], items: Sequence[Any], chunks: Sequence[range]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    write_each_line()
    for chunk in chunks:
        results: list[Any] = []
        error: Exception | None = None
        try:
            for item in items[chunk.start : chunk.stop]:
                results.append(function(item))
        except Exception as raised:
            error = raised
        writer.send((results, error))
        if error is not None:
            return
