"""Calls and tests of a repository, run in a forked process of their own that imports it once."""

import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SECONDS = 0.5
"""For a call; a planted bug must not loop for ever."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call: JSON of a value, or an exception's type and text."""

    is_value: bool
    text: str


def write(folder: str, files: Mapping[str, str]) -> None:
    for path, content in files.items():
        place = Path(folder, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)


def evaluate(
    files: Mapping[str, str], calls: Sequence[tuple[str, list[Any]]], tests: Sequence[str] = (), passes: int = 1
) -> tuple[list[Outcome | None], bool]:
    """Outcomes of calls ("package.module:name", arguments), and whether all tests pass.

    With two passes, None stands for a call whose outcome depends on the calls before. Errors: RuntimeError."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files)
        process = context.Process(target=_run, args=(theirs, folder, calls, tests, passes))
        process.start()
        theirs.close()
        try:
            return ours.recv()
        except EOFError:
            raise RuntimeError(f"a repository cannot be run: {sorted(files)}") from None
        finally:
            process.join()


def _run(connection: Connection, folder: str, calls: Sequence, tests: Sequence[str], passes: int) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGALRM, _end)
    outcomes = [_outcome(*call) for call in calls]
    if passes == 2:
        again = [_outcome(*call) for call in reversed(calls)][::-1]
        outcomes = [one if one == other else None for one, other in zip(outcomes, again, strict=True)]
    passed = True
    if tests:
        suite = unittest.defaultTestLoader.loadTestsFromNames(tests)
        passed = suite.countTestCases() > 0 and unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful()
    connection.send((outcomes, passed))


def _end(number: int, frame: object) -> None:
    raise TimeoutError


def _outcome(function: str, arguments: list[Any]) -> Outcome | None:
    """None for a call that takes too long."""
    module, _, name = function.partition(":")
    copied = json.loads(json.dumps(arguments))
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        value = getattr(importlib.import_module(module), name)(*copied)
        return Outcome(True, json.dumps(value, sort_keys=True, allow_nan=False))
    except TimeoutError:
        return None
    except Exception as error:  # whatever a planted bug raises is what the call gives
        return Outcome(False, f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
