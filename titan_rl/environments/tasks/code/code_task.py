"""Programming problems of the user's own file: ``[task] name = "code"``, ``[task.options] file = "problems.jsonl"``.

A row has, beside its prompt, ``tests`` in the shape that public sets of such problems have, as JSON or as text of it:

    {"inputs": ["3\\n"], "outputs": ["16\\n"]}                        standard input and output
    {"fn_name": "solve", "inputs": [[3], [-2]], "outputs": [16, 11]}  arguments of a function, and what it gives

An ``answer`` is a program that passes, for SFT. What a model wrote runs in the sandbox alone, in the verifier's own
time: many programs at once, beside generation.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.prompts.jsonl_task import RowsOptions, RowsTask
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.sandbox.pool import check_sandbox, shared_sandbox
from titan_rl.environments.sandbox.program import Call, Limits, SandboxFailed
from titan_rl.environments.tasks.code.code_tests import CodeTest, FunctionTest, StreamTest, run_tests, source_of


@dataclass(kw_only=True)
class CodeOptions(RowsOptions):
    """``[task.options]`` of programs to write."""

    seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    """That a program may take for a test with standard input, or for all calls of its function."""
    memory_mib: Annotated[int, Field(ge=32)] = 256
    credit: Literal["all", "each"] = "all"
    """``all``: 1 for a program that passes every test; ``each``: the share that it passes."""


class CodeTask(RowsTask):
    """Task of programming problems. Errors: as RowsTask; ConfigError without a sandbox."""

    OPTIONS = CodeOptions
    options: CodeOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'code' is scored by its tests: leave task.reward out, or take 'jsonl'")
        check_sandbox()

    def _check(self, row: DataRow) -> None:
        self._check_style(row)
        tests_of(row.place, row.columns.get("tests"))

    @property
    def has_one_answer(self) -> bool:
        return True

    def environment(self, prompt: Prompt) -> "CodeEnvironment":
        tests = tests_of(prompt.entry["place"], prompt.entry["row"]["tests"])
        limits = Limits(seconds=self.options.seconds, memory=self.options.memory_mib << 20)
        return CodeEnvironment(tests, limits, self.options.credit)

    def is_exact(self, prompt: Prompt) -> bool:
        return False

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the environment runs the tests, and rewards."""
        return {}


@dataclass
class CodeEnvironment(OneAnswer):
    """Environment of one answer, whose program is run against the tests."""

    tests: list[CodeTest]
    limits: Limits
    credit: Literal["all", "each"]

    async def step(self, answer: str) -> Reply:
        try:
            verdicts = await run_tests(shared_sandbox(), source_of(answer), self.tests, self.limits)
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the sandbox: {error}") from error
        return Reply(reward=float(all(verdicts)) if self.credit == "all" else sum(verdicts) / len(verdicts))


def tests_of(place: str, tests: Any) -> list[CodeTest]:
    """Parse a row's tests. Errors: ConfigError with the row's place."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: 'tests' is no JSON: {error}") from None
    if not isinstance(tests, dict) or not isinstance(tests.get("inputs"), list):
        raise ConfigError(f"{place}: 'tests' must be {{inputs, outputs}}, or {{fn_name, inputs, outputs}}")
    inputs, outputs, name = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ConfigError(f"{place}: 'tests' needs as many outputs as inputs, and at least one")
    if name is None:
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise ConfigError(f"{place}: inputs and outputs of 'tests' are texts unless it has a 'fn_name'")
        return [StreamTest(stdin, stdout) for stdin, stdout in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not all(isinstance(arguments, list) for arguments in inputs):
        raise ConfigError(
            f"{place}: with a 'fn_name', which is text, each of the inputs of 'tests' is a list of arguments"
        )
    pairs = zip(inputs, outputs, strict=True)
    return [FunctionTest(Call(name, tuple(arguments)), value) for arguments, value in pairs]
