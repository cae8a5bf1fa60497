"""Fuzzers: what a border does with anything that hypothesis thinks of, within bounds of CPU time and memory.

In ``make test`` each takes a few examples, the same ones every time. ``make fuzz`` sets FUZZ_SECONDS: then each goes on
for as long, with others every time, and a failure tells the example that ``examples`` of that fuzzer is to keep.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from titan_rl.config.command_line import _one_line
from titan_rl.config.load import ConfigError

SECONDS = float(os.environ.get("FUZZ_SECONDS", 0))
_FEW, _MANY = 60, 500
_CPU_SECONDS, _BYTES = 10.0, 1 << 30
"""Of an example. CPU time is the same on a busy machine; what sleeps too long runs into pytest's timeout."""
_LONGEST_LINE = 1010


def fuzz(examples: Sequence[dict[str, Any]] = (), few: int = _FEW, **strategies: st.SearchStrategy) -> Callable:
    """A test that calls the function with values of these strategies. ``examples``: what was once found, first."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        count = 0

        def bounded(**values: Any) -> None:
            nonlocal count
            count += 1
            with within_bounds():
                check(**values)

        bounded.__name__ = bounded.__qualname__ = check.__name__
        found = reduce(lambda test, values: example(**values)(test), reversed(examples), bounded)
        tried = settings(
            max_examples=_MANY if SECONDS else few,
            derandomize=not SECONDS,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(given(**strategies)(found))

        @pytest.mark.fuzz
        def test() -> None:
            begun = time.monotonic()
            tried()
            while time.monotonic() < begun + SECONDS:
                tried()
            seconds = time.monotonic() - begun
            print(f"{check.__name__}: {count} examples, {count / seconds:.0f} a second")

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@contextmanager
def within_bounds() -> Iterator[None]:
    """Errors: AssertionError for CPU time; MemoryError. Code that swallows the first is told of all the same."""
    is_over = []

    def end(number: int, frame: object) -> None:
        is_over.append(True)
        raise AssertionError(f"more than {_CPU_SECONDS:g} s of CPU time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (now + _BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
    assert not is_over, f"more than {_CPU_SECONDS:g} s of CPU time"


def assert_one_line(error: Exception) -> None:
    """As a command tells it; several findings, each in one."""
    for finding in error.findings if isinstance(error, ConfigError) else [str(error)]:
        line = _one_line(finding)
        assert line.strip() and line.isprintable() and len(line) <= _LONGEST_LINE, line[:200]


# values


ANY_TEXT = st.text(max_size=30) | st.text(st.characters(), max_size=8)
"""With half characters in the second."""
_ODD = ["", "\ud800", "\x1b]0;title\x07", "a\nb", "\x00", "\u202e", "１２", "-", "../..", "{", '"', "\\"]
_HUGE, _DEEP, _FAR = "<huge>", "<deep>", "<far>"
_MARKS = {_HUGE: "9" * 5000, _DEEP: "[" * 100_000 + "]" * 100_000, _FAR: "1e999"}
"""Numbers and nests that no value of Python stands for."""
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ANY_TEXT
    | st.sampled_from([*_ODD, *_MARKS, 10**400, -1, 1 << 63, 1e308])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4), max_leaves=12
)


def as_json(value: Any) -> str:
    """Also of what Python's JSON has no way to say."""
    text = json.dumps(value)
    return reduce(lambda text, mark: text.replace(f'"{mark}"', _MARKS[mark]), _MARKS, text)


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """A valid value, of which a few parts are something else, missing, or there twice."""
    return _spoilt(draw, value, draw(st.sampled_from([4, 12, 40])))


def _spoilt(draw: st.DrawFn, value: Any, one_in: int) -> Any:
    if draw(st.integers(1, one_in)) == one_in:
        return draw(VALUES)
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if draw(st.integers(1, one_in)) < one_in}
        more = draw(st.dictionaries(ANY_TEXT, VALUES, max_size=1)) if draw(st.integers(1, one_in)) == 1 else {}
        return {key: _spoilt(draw, each, one_in) for key, each in kept.items()} | more
    if isinstance(value, list):
        return [_spoilt(draw, each, one_in) for each in value for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2])))]
    return value


@st.composite
def mutated(draw: st.DrawFn, valid: bytes, pieces: Sequence[bytes] = ()) -> bytes:
    """Valid bytes with a few places written over, cut out, or filled with other ones."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 8)))
        some = st.binary(max_size=8) | st.sampled_from([*pieces, b"", b"\xff" * 8, b"\x00" * 8])
        data[start:stop] = draw(some)
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data)


def fragments(*pieces: str) -> st.SearchStrategy[str]:
    """Text made of these pieces, and of anything else between them."""
    some = st.sampled_from(pieces) | ANY_TEXT
    return st.lists(some, max_size=14).map("".join)


lists_of = partial(st.lists, max_size=4)
