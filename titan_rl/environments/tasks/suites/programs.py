"""HumanEval and MBPP: programs to write, run with the set's own assertions in the sandbox.

    HumanEval   prompt (a function's head), test (defines check), entry_point
    MBPP        text or prompt, test_list, test_setup_code or test_imports

The set's tests are code, so they run beside the program, behind it: a program passes if all assertions do. That is the
sets' published rule, and a program made to redefine equality would pass; for training take ``code``, whose expected
values never enter the sandbox.
"""

import ast
import re
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.row_fields import shown
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.sandbox.pool import check_sandbox, shared_sandbox
from titan_rl.environments.sandbox.program import Call, Limits, Program, SandboxFailed
from titan_rl.environments.tasks.code.code_tests import source_of
from titan_rl.environments.tasks.suites.base import SuiteOptions, SuiteTask, text_column


@dataclass(kw_only=True)
class ProgramOptions(SuiteOptions):
    """``[task.options]`` of programs to write."""

    seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    """That a program may take with all its tests."""
    memory_mib: Annotated[int, Field(ge=32)] = 256


class ProgramsTask(SuiteTask):
    """Task of programs with assertions. Errors: ConfigError without a sandbox."""

    OPTIONS = ProgramOptions
    options: ProgramOptions
    VOTES = False

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        check_sandbox()

    @abstractmethod
    def program(self, row: dict[str, Any], source: str) -> str:
        """Program of an answer's source, with the row's tests behind it."""

    @property
    def has_one_answer(self) -> bool:
        return True

    def _check(self, row: DataRow) -> None:
        self._check_style(row)
        try:
            ast.parse(self.program(row.columns, ""))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{row.place}: its tests are no Python: {error}; correct the row") from None

    def environment(self, prompt: Prompt) -> "ProgramEnvironment":
        limits = Limits(seconds=self.options.seconds, memory=self.options.memory_mib << 20)
        return ProgramEnvironment(self, prompt.entry["row"], limits)

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the environment runs the tests, and rewards."""
        return {}


@dataclass
class ProgramEnvironment(OneAnswer):
    """Environment of one answer, whose program is run with its row's tests."""

    task: ProgramsTask
    row: dict[str, Any]
    limits: Limits

    async def step(self, answer: str) -> Reply:
        name, passed = f"passed_{secrets.token_hex(8)}", secrets.token_hex(16)
        source = f"{self.task.program(self.row, source_of(answer))}\n\ndef {name}():\n    return {passed!r}\n"
        try:
            outcome = await shared_sandbox().run(Program(source, calls=(Call(name),), limits=self.limits))
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the sandbox: {error}") from error
        results = outcome.results or ()
        return Reply(reward=float(any(result.error is None and result.value == passed for result in results)))


class HumanEvalTask(ProgramsTask):
    """Task of functions to complete."""

    INSTRUCTION = "Complete the function, and give the whole of it in a Python code block."

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow:
        head, test, name = (text_column(place, columns, column) for column in ("prompt", "test", "entry_point"))
        if not name.isidentifier() or _definition(name, head) is None or _definition("check", test) is None:
            raise ConfigError(f"{place}: 'prompt' defines 'entry_point', and 'test' a function check: correct the row")
        solution = columns.get("canonical_solution")
        answer = head + solution if isinstance(solution, str) else None
        return DataRow(place, columns, self._asked(f"```python\n{head.rstrip()}\n```"), None, answer)

    def program(self, row: dict[str, Any], source: str) -> str:
        """A source without the function continues the prompt; else what stands before it in the prompt goes first."""
        head, name = row["prompt"], row["entry_point"]
        begun = _before(name, head) if _definition(name, source) else head if source else ""
        return f"{begun}{source}\n\n{row['test']}\n\ncheck({name})\n"


def _definition(name: str, source: str) -> re.Match[str] | None:
    """Beginning of a function's definition, outside of all others."""
    return re.search(rf"^(?:async +)?def +{re.escape(name)}\s*[\[(]", source, re.MULTILINE)


def _before(name: str, head: str) -> str:
    """What stands before a function's definition."""
    definition = _definition(name, head)
    assert definition, "_row has refused a prompt without it"
    return head[: definition.start()]


class MBPPTask(ProgramsTask):
    """Task of functions described in a sentence, with assertions."""

    INSTRUCTION = "Give the program in a Python code block."

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow:
        described, tests = text_column(place, columns, "text", "prompt"), columns.get("test_list")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ConfigError(f"{place}: 'test_list' is {shown(tests)}: give a list of assertions")
        asked = f"{described}\n\nThe program must pass these tests:\n" + "\n".join(tests)
        answer = columns.get("code")
        return DataRow(place, columns, self._asked(asked), None, answer if isinstance(answer, str) else None)

    def program(self, row: dict[str, Any], source: str) -> str:
        imports = row.get("test_imports") or []
        before = [row.get("test_setup_code") or "", *(imports if isinstance(imports, list) else [])]
        return "\n".join([*map(str, before), source, "", *row["test_list"], ""])
