"""Whether what an agent left in a workspace resolves an issue.

    the repository's folder, in a workspace that is otherwise as it was before the agent
      ─▶ test files are laid over it
      ─▶ tests by name: the exit code of their command
      ─▶ calls: values that come out, compared here

Nothing of the agent's runs any more, and no expected value goes in. A check by value is passed by the right values
alone. A test runs in one process with the code that it tests: code that takes over the runner can pass it, as with all
suites of tests that are judged by their own report; rows whose reward must not be forged have ``calls``.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.values import same
from titan_rl.environments.sandbox.workspace.command import Command, Workspace
from titan_rl.environments.tasks.swe.rows import WHEN, CallCheck, Checks, When

_DRIVER = """
import importlib, json, os, sys
calls, out = json.load(sys.stdin), os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
sys.path.insert(0, os.getcwd())
values = []
for function, arguments in calls:
    try:
        module, _, name = function.partition(":")
        values.append([json.dumps(getattr(importlib.import_module(module), name)(*arguments))])
    except Exception:
        values.append([])
os.write(out, json.dumps(values).encode())
os._exit(0)
"""


async def resolves(workspace: Workspace, checks: Checks, seconds: float) -> dict[When, float]:
    """Share of the checks that pass, of those that must turn green and of those that must stay so.

    ``seconds``: for each of the runs, of which there are at most three. Errors: SandboxFailed."""
    evaluated = await workspace.fork_folder()
    try:
        for path, content in checks.test_files.items():
            await _write(evaluated, path, content)
        passed: dict[When, list[bool]] = {when: [] for when in WHEN}
        for call, passes in zip(checks.calls, await _run_calls(evaluated, checks.calls, seconds), strict=True):
            passed[call.when].append(passes)
        for when in WHEN:
            if checks.tests[when]:
                passed[when].append(await _run_tests(evaluated, checks, when, seconds))
        return {when: sum(passed[when]) / len(passed[when]) if passed[when] else 1.0 for when in WHEN}
    finally:
        await evaluated.close()


async def _write(workspace: Workspace, path: str, content: bytes) -> None:
    """Errors: SandboxFailed. (A link that the agent has laid there is taken away, and so is a folder.)"""
    place, parent = shlex.quote(f"./{path}"), shlex.quote(f"./{PurePosixPath(path).parent}")
    line = f"rm -rf {place} && mkdir -p {parent} && cat > {place}"
    result = await workspace.run(Command(line, stdin=content))
    if result.ending == "timeout":
        raise SandboxFailed(f"the test file {path} could not be written: {result.output.strip()[:200]}")


async def _run_tests(workspace: Workspace, checks: Checks, when: When, seconds: float) -> bool:
    """Whether all of them pass."""
    names = " ".join(map(shlex.quote, checks.tests[when]))
    return (await workspace.run(Command(f"{checks.test_command} {names}", seconds=seconds))).ending == "ok"


async def _run_calls(workspace: Workspace, calls: Sequence[CallCheck], seconds: float) -> list[bool]:
    if not calls:
        return []
    asked = json.dumps([(call.function, call.arguments) for call in calls]).encode()
    line = f"python3 -I -B -c {shlex.quote(_DRIVER)}"
    result = await workspace.run(Command(line, stdin=asked, seconds=seconds))
    return [_is_right(value, call) for value, call in zip(_values(result.raw_output, len(calls)), calls, strict=True)]


def _values(output: bytes, count: int) -> list[str | None]:
    """JSON of each value; None where there is none. The program is hostile, and so is what it gives."""
    try:
        values = json.loads(output)
        if len(values) != count:
            return [None] * count
        return [value[0] if len(value) == 1 and isinstance(value[0], str) else None for value in values]
    except (ValueError, TypeError, RecursionError, KeyError):
        return [None] * count


def _is_right(value: str | None, call: CallCheck) -> bool:
    try:
        return value is not None and same(json.loads(value), call.expected)
    except (ValueError, RecursionError):
        return False
