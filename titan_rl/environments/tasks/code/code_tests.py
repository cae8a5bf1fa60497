"""Tests of model-written programs: run in the sandbox, judged here.

A test's inputs go in, its expected value never does, so that a program can earn its verdict by nothing but the right
values.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.environments.sandbox.program import Call, Limits, Outcome, Program, Runner
from titan_rl.environments.sandbox.values import same

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class FunctionTest:
    """Call of the program's function with its expected value, compared with all types."""

    call: Call
    expected: Any


@dataclass(frozen=True)
class StreamTest:
    """Standard input and expected standard output; white space at the ends of lines does not count."""

    stdin: str
    expected: str


CodeTest = FunctionTest | StreamTest


def source_of(answer: str) -> str:
    """Source of an answer: its last fenced block, else all of it."""
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


async def run_tests(sandbox: Runner, source: str, tests: Sequence[CodeTest], limits: Limits) -> list[bool]:
    """Run a program's tests; a verdict for each. Errors: SandboxFailed, never a wrong answer."""
    program = Program(source, limits=limits)
    functions = [test for test in tests if isinstance(test, FunctionTest)]
    gives: list[bool] = []
    if functions:
        outcome = await sandbox.run(replace(program, calls=tuple(test.call for test in functions)))
        gives = _right_values(outcome, functions)
    verdicts, of_functions = [], iter(gives)
    for test in tests:
        if isinstance(test, FunctionTest):
            verdicts.append(next(of_functions))
        else:
            verdicts.append(_right_text(await sandbox.run(replace(program, stdin=test.stdin)), test.expected))
    return verdicts


def _right_values(outcome: Outcome, tests: Sequence[FunctionTest]) -> list[bool]:
    if outcome.results is None:
        return [False] * len(tests)
    pairs = zip(outcome.results, tests, strict=True)
    return [result.error is None and same(result.value, test.expected) for result, test in pairs]


def _right_text(outcome: Outcome, expected: str) -> bool:
    return outcome.ending == "ok" and _lines(outcome.stdout) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]
