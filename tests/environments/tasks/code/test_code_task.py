"""Programs to write, and Python as a tool: both run in the sandbox, and what fails there is nobody's wrong answer."""

import asyncio
import json

import pytest
from boxes import need_boxes

from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.conversation.tools import ToolEnvironment
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.registry import make_task
from titan_rl.environments.sandbox.pool import Sandbox
from titan_rl.environments.sandbox.program import Call, CallResult, Limits, Outcome, SandboxFailed
from titan_rl.environments.tasks import python_tool
from titan_rl.environments.tasks.code import code_task
from titan_rl.environments.tasks.code.code_task import tests_of as read_tests
from titan_rl.environments.tasks.code.code_tests import FunctionTest, run_tests, source_of

ADD = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}
SPEAK = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]}
RIGHT = "def add(a, b):\n    return a + b"
SPOKEN = "print(sum(map(int, input().split())))"


@pytest.fixture
def sandbox(monkeypatch):
    """Makes one for the event loop of a test."""
    need_boxes()

    async def inside(work):
        shared = Sandbox(2)
        for module in (code_task, python_tool):
            monkeypatch.setattr(module, "shared_sandbox", lambda: shared)
        try:
            return await work()
        finally:
            await shared.close()

    return lambda work: asyncio.run(inside(work))


def task_of(tmp_path, *rows, **options):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task(TaskConfig(name="code", options={"file": str(file), "held_out_share": 0.5} | options))


@pytest.mark.parametrize(
    ("tests", "credit", "answer", "reward"),
    [
        (ADD, "all", RIGHT, 1.0),
        (ADD, "all", f"Adding is easy:\n```python\n{RIGHT}\n```\nThat is all.", 1.0),
        (ADD, "all", "def add(a, b):\n    return 3", 0.0),
        (ADD, "each", "def add(a, b):\n    return 3", 0.5),
        (ADD, "all", "def add(a, b):\n    return float(a + b) if a == 1 else a + b", 0.0),
        (ADD, "all", "", 0.0),
        (ADD, "all", "3", 0.0),
        (SPEAK, "all", SPOKEN, 1.0),
        (json.dumps(SPEAK), "all", SPOKEN, 1.0),
        (SPEAK, "each", "print(3)", 0.5),
        (SPEAK, "all", "while True: pass", 0.0),
    ],
)
def test_a_program_earns_what_it_passes(sandbox, tmp_path, tests, credit, answer, reward):
    rows = [{"prompt": f"Write number {number}.", "tests": tests} for number in range(4)]
    task = task_of(tmp_path, *rows, credit=credit, seconds=0.5)
    environment = task.environment(task.prompt("train", 1, 0))
    reply = sandbox(lambda: environment.step(answer))
    assert reply.reward == reward and not reply.messages
    assert task.score(task.prompt("train", 1, 0), [answer]) == {}


@pytest.mark.parametrize(
    ("given", "expected", "is_right"),
    [(3, 3, True), (3.0, 3, False), (True, 1, False), ([1, 2], [1, 2], True), ((1, 2), [1, 2], False)],
)
def test_a_verdict_tells_types_apart(given, expected, is_right):
    class FakeSandbox:
        async def run(self, program):
            return Outcome("ok", 0, "", "", (CallResult(given),), 0.1, 0)

    tests = [FunctionTest(Call("f"), expected)]
    assert asyncio.run(run_tests(FakeSandbox(), "", tests, Limits())) == [is_right]


def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch, tmp_path):
    class Broken:
        async def run(self, program):
            raise SandboxFailed("the box died")

    for module in (code_task, python_tool):
        monkeypatch.setattr(module, "shared_sandbox", lambda: Broken())
    monkeypatch.setattr(code_task, "check_sandbox", lambda: None)
    monkeypatch.setattr(python_tool, "check_sandbox", lambda: None)
    task = task_of(tmp_path, *({"prompt": str(n), "tests": ADD} for n in range(4)))
    with pytest.raises(EnvironmentFailed, match="the sandbox: the box died"):
        asyncio.run(task.environment(task.prompt("train", 1, 0)).step(RIGHT))
    with pytest.raises(EnvironmentFailed, match="tool python failed 3 times: SandboxFailed: the box died"):
        asyncio.run(ToolEnvironment([python_tool.python_tool()]).step(called("print(1)")))


def called(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@pytest.mark.parametrize(
    ("code", "told", "status"),
    [
        ("print(6 * 7)", "42", "ok"),
        ("x = 1", "(it printed nothing)", "ok"),
        ("print(1)\n1 / 0", "1\nTraceback", "ok"),
        ("import time\ntime.sleep(9)", "stopped after 0.5 s", "ok"),
        ("while True: print('x' * 100)", "stopped: more than 64 KiB of output", "ok"),
    ],
)
def test_python_as_a_tool_tells_what_a_program_printed(sandbox, code, told, status):
    tool = python_tool.python_tool(Limits(seconds=0.5))
    reply = sandbox(lambda: ToolEnvironment([tool]).step(called(code)))
    said = reply.messages[0]["content"]
    assert told in said or (code.startswith("while") and said.startswith("xxx")), said
    assert [call.status for call in reply.calls] == [status]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "'tests' must be"),
        ("{", "'tests' is no JSON"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": ["1"], "outputs": []}, "as many outputs as inputs"),
        ({"inputs": [[1]], "outputs": [1]}, "texts unless it has a 'fn_name'"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "a list of arguments"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "which is text"),
    ],
)
def test_tests_that_are_none_are_told_by_their_line(tmp_path, capsys, tests, said):
    with pytest.raises(ConfigError, match=said):
        read_tests("problems.jsonl line 1", tests)
    check_or_skip()
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"prompt": "Write.", "tests": tests}) + "\n")
    command = ["--run.dir", str(tmp_path / "run"), "--task.name", "code", "--task.options.file", str(file)]
    assert main(["train", *command]) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err and "problems.jsonl line 1" in err and not (tmp_path / "run").exists()


def test_a_reward_function_has_no_place_there(tmp_path):
    task = TaskConfig(name="code", reward="somewhere:one", options={"file": "x"})
    with pytest.raises(ConfigError, match="leave task.reward out"):
        make_task(task)


def check_or_skip() -> None:
    need_boxes()


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        ("print(1)", "print(1)"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```python\ncut off", "cut off"),
    ],
)
def test_the_last_block_is_the_program(answer, source):
    assert source_of(answer) == source
