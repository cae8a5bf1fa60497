"""Limits of a chat template, a program that came with a model: computation and memory of its rendering.

jinja2's sandbox keeps it from files and code, and transformers renders it there; neither bounds loops within loops, or
a text that doubles. Memory is bounded only while a run is being checked (``checking``): the limit is the process's, and
later other threads compute beside.
"""

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 1.0
"""Of a rendering's computing, which takes milliseconds."""
_MEMORY = 256 << 20
"""Bytes, besides what the process holds."""
_PAGE = resource.getpagesize()
_is_checking: ContextVar[bool] = ContextVar("_is_checking", default=False)


class _Generation(Extension):
    """The tag by which transformers marks an assistant's part."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextmanager
def checking() -> Iterator[None]:
    """Templates are rendered for the first time, by a process that does nothing else."""
    token = _is_checking.set(True)
    try:
        yield
    finally:
        _is_checking.reset(token)


@contextmanager
def limited() -> Iterator[None]:
    """Limits of time and memory while a template is rendered. Errors: TemplateError after SECONDS, or, while a run is
    being checked, for too much memory."""
    deadline = _Deadline()
    before, memory = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    is_alone = _is_checking.get() and threading.current_thread() is threading.main_thread()
    if is_alone:
        resident = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        most = resident + _MEMORY if memory[0] == resource.RLIM_INFINITY else min(memory[0], resident + _MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (most, memory[1]))
    sys.settrace(deadline)
    try:
        yield
    except _OutOfTime:
        raise TemplateError(f"it computes for more than {SECONDS:g} s: it has loops that do not end") from None
    except MemoryError:
        raise TemplateError(f"it fills the memory: a text needs no {_MEMORY >> 20} MiB") from None
    finally:
        sys.settrace(before)
        if is_alone:
            resource.setrlimit(resource.RLIMIT_AS, memory)


class _OutOfTime(BaseException):
    """jinja2 goes on after whatever is an Exception while it computes constants."""


class _Deadline:
    """Traces calls, and lines of templates. The clock of the wall is fast to read, that of the thread is just."""

    def __init__(self) -> None:
        self._wall, self._end = time.monotonic() + SECONDS, time.thread_time() + SECONDS

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > self._wall and time.thread_time() > self._end:
            raise _OutOfTime
        return self if frame.f_code.co_filename == "<template>" else None


@lru_cache(maxsize=64)
def check_source(template: str) -> None:
    """Check of a template's source.

    Errors: TemplateError for a power of numbers, which takes minutes within one step, and no text needs.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        has_power = next(environment.parse(template).find_all(nodes.Pow), None) is not None
    except TemplateSyntaxError:  # told when it is compiled
        return
    if has_power:
        raise TemplateError("it computes powers (**), which no text needs")
