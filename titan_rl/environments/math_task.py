"""Mathematics from the user's own file: ``[task] name = "math"``, ``[task.options] file = "problems.jsonl"``.

A row's ``answer`` is LaTeX or plain, as public sets have it. What a model gives last is its answer: what it puts into
its last ``\\boxed{}``, else its last line. Whether the two are equal, math-verify says, in a scoring process: an answer
that keeps it busy for ever is a ``timeout``, and nobody else waits for it. math-verify is lenient where people are, so
what it never gets to see here is a choice of answers, a chain of equations, prose, or a relation where none is wanted.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.row_files import DataRow
from titan_rl.environments.rows import RowsTask

_LONGEST = 300
"""Characters of a final answer; a longer one is wrong."""
_CHECKED = 500
"""Rows of a file whose answers are read before anything starts: each takes some milliseconds."""
_SAID = re.compile(r".*\b(?:answer|result)\b\s*(?:is|:|=)\s*:?\s*(.*)", re.IGNORECASE | re.DOTALL)
_RELATIONS = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|in|subset\w*|approx|equiv|sim)\b|[<>≤≥≠≈∈]|!=")
_CHOICES = re.compile(r"\\(?:pm|mp|lor|vee|mid|text\{\s*(?:or|and)\b)|[±;|]|\b(?:or|and)\b")
_MALFORMED = re.compile(
    r"""\.\s*\d*\s*\.                                  # 4..5, 4.5.6
    | \d\s+\.                                         # 4 .5
    | \d(?:[\s~]|\\q?quad|\\[,;:!\ ])+\d                 # 4 5, which would be read as a sum
    | [\^_+\-*/=(\[{]\s*$ | ^\s*[\^*/=)]              # what lacks a side
    | ['′…_] | \\[lc]?dots""",
    re.VERBOSE,
)
_COMMANDS = re.compile(r"\\[A-Za-z]+|\\.")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan"})
_GROUPED = re.compile(r"(?<=\d)(?:,|\\,|\{,\}|\\!)(?=\d{3}(?!\d))")


class MathTask(RowsTask):
    """Errors: as RowsTask; ConfigError for a row whose answer cannot be read as mathematics."""

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'math' is scored by its answers: leave task.reward out, or take 'jsonl'")
        self._num_checked = 0

    def prepare_scoring(self) -> None:
        """The imports, which take a second."""
        _library()

    def _check(self, row: DataRow) -> None:
        super()._check(row)
        self._num_checked += 1
        assert row.answer is not None, "checked above, since a task of this kind scores itself"
        if self._num_checked <= _CHECKED and not _read(row.answer):
            raise ConfigError(
                f"{row.place}: the 'answer' {row.answer!r} cannot be read as mathematics: write it in LaTeX, or take "
                f"task.name = 'jsonl'"
            )

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Errors: ValueError for a row's answer that cannot be read."""
        return {"right": float(is_right(answers[-1], prompt.answer))}


def is_right(answer: str, expected: str) -> bool:
    """Whether what an answer gives last equals what is expected. Errors: ValueError if that cannot be read."""
    wanted = _read(expected)
    if not wanted:
        raise ValueError(f"the expected answer {expected!r} cannot be read as mathematics")
    given = final_answer(answer)
    if given is None or not _is_one_answer(given, _plain(expected)):
        return False
    _, verify = _library()
    return bool(verify(wanted, _read(given), float_rounding=12, timeout_seconds=None, raise_on_error=False))


def final_answer(answer: str) -> str | None:
    """What is in the last ``\\boxed{}``; else the last line, or what it says that the answer is."""
    start = answer.rfind("\\boxed{")
    if start >= 0:
        return _in_braces(answer, start + len("\\boxed{"))
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    said = _SAID.fullmatch(lines[-1])
    return (said[1] if said else lines[-1]).strip().rstrip(".").strip() or None


def _in_braces(text: str, start: int) -> str | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start:index].strip() or None
    return None


def _plain(expression: str) -> str:
    """Without the signs of mathematics around it, and without those that group digits."""
    text = expression.strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            text = text[len(left) : -len(right)].strip()
            break
    return _GROUPED.sub("", text)


def _is_one_answer(given: str, expected: str) -> bool:
    """Whether it is of the expected form, and says one thing."""
    given = _plain(given)
    if len(given) > _LONGEST or "$" in given or not given.isprintable():
        return False
    if any(_WORD.search(text) for text in _unknown_words(given, expected)):
        return False
    for form in (_RELATIONS, _CHOICES, _MALFORMED):
        if form.search(given) and not form.search(expected):
            return False
    if any(given.count(sign) != expected.count(sign) for sign in ",%"):
        return False
    left, *right = given.split("=")
    if not right or "=" in expected:
        return given.count("=") == expected.count("=")
    return len(right) == 1 and re.fullmatch(r"\s*[A-Za-z]\s*(?:\([A-Za-z]\))?\s*", left) is not None


def _unknown_words(given: str, expected: str) -> list[str]:
    """Of prose; what the expected answer says, too, is none."""
    known = {*_FUNCTIONS, *_WORD.findall(expected)}
    return [word for word in _WORD.findall(_COMMANDS.sub(" ", given)) if word not in known]


def _read(expression: str) -> list[Any]:
    parse, _ = _library()
    return parse(f"${_plain(expression)}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no limit of its own


@cache
def _library() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """math-verify's ``parse`` and ``verify``. They say by name in a log what cannot be read, which is no news here."""
    from math_verify import parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return parse, verify
