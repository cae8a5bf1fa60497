"""Whether what an agent left in a workspace resolves an issue.

    the repository's folder, in a workspace that is otherwise as it was before the agent
      ─▶ test files are laid over it
      ─▶ tests by name: the exit code of their command
      ─▶ calls: values that come out, compared here

Nothing of the agent's runs any more, and no expected value goes in. A check by value is passed by the right values
alone. A test runs in one process with the code that it tests: code that takes over the runner can pass it, as with all
suites of tests that are judged by their own report; rows whose reward must not be forged have ``calls``. With
``reward_file`` all of the workspace is judged, programs too, by what its tests write.
"""

import json
import math
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.values import same
from titan_rl.environments.sandbox.workspace.command import Command, CommandResult, Workspace, WorkspaceSpoiled
from titan_rl.environments.sandbox.workspace.images import check_path
from titan_rl.environments.tasks.swe.rows import WHEN, CallCheck, Checks, When

_MOST_BYTES = 16 << 20
"""Of a test file."""
_RENAMED = re.compile(r"^rename from (.+)$", re.MULTILINE)
_MOST_NAMES = 60_000
"""Bytes of the names of tests in one line."""
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


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of evaluation."""

    seconds: float
    """For each of the runs, of which there are at most three."""
    credit: Literal["all", "each"] = "all"
    """``each``: the share of what must turn green, if nothing else is lost."""


@dataclass(frozen=True)
class _TestFile:
    """Test file as it is laid into a workspace; without content it is deleted."""

    content: bytes | None
    is_executable: bool = False


async def resolution_reward(
    workspace: Workspace, begin: Callable[[], Awaitable[Workspace]], checks: Checks, settings: EvaluationSettings
) -> float:
    """Reward of what an agent left in a workspace, which takes no command any more; 0 for what takes no tests.

    ``begin``: opens one as it was before the agent. Errors: SandboxFailed."""
    test_files = {path: _TestFile(content, content.startswith(b"#!")) for path, content in checks.test_files.items()}
    if checks.test_patch:
        test_files |= await _patched(begin, checks.test_patch)
    try:
        evaluated = await (workspace.fork() if checks.reward_file else workspace.fork_folder())
        try:
            await _lay(evaluated, checks.test_folder, test_files)
            if checks.reward_file:
                return await _written_reward(evaluated, checks, settings.seconds)
            shares = await _shares(evaluated, checks, settings.seconds)
        finally:
            await evaluated.close()
    except WorkspaceSpoiled:
        return 0.0
    if shares["PASS_TO_PASS"] < 1.0:
        return 0.0
    green = shares["FAIL_TO_PASS"]
    return green if settings.credit == "each" else float(green == 1.0)


# test files


async def _patched(begin: Callable[[], Awaitable[Workspace]], patch: str) -> dict[str, _TestFile]:
    """Files that a patch touches, as it leaves them in a repository that no agent has seen. Errors: SandboxFailed."""
    workspace = await begin()
    stdin, why = patch.encode(), "the row's test_patch does not fit its repository"
    try:
        listed = await _run(workspace, "git apply --numstat -z -", why, stdin)
        await _run(workspace, "git apply --whitespace=nowarn -", why, stdin)
        names = [line.split(b"\t", 2)[2] for line in listed.raw_output.split(b"\0") if line.count(b"\t") >= 2]
        paths = [name.decode(errors="surrogateescape") for name in names] + _RENAMED.findall(patch)
        return {path: await _file_at(workspace, path) for path in paths}
    finally:
        await workspace.close()


async def _file_at(workspace: Workspace, path: str) -> _TestFile:
    """Errors: SandboxFailed."""
    try:
        check_path(path)
    except ConfigError as error:
        raise SandboxFailed(f"the row's test_patch: {error}") from None
    place = shlex.quote(f"./{path}")
    line = (
        f"if test -L {place}; then echo link; elif test -x {place}; then echo run; elif test -f {place}; then echo file"
    )
    told = await _run(workspace, f"{line}; fi; cat {place} 2>/dev/null || true", path, output=_MOST_BYTES)
    kind, _, content = told.raw_output.partition(b"\n")
    if kind == b"link":
        raise SandboxFailed(f"the row's test_patch makes the link {path}, which is not laid: give its target instead")
    return _TestFile(content if kind else None, kind == b"run")


async def _lay(workspace: Workspace, folder: str, files: Mapping[str, _TestFile]) -> None:
    """Lay files into a folder, the repository's by default; one of their own begins empty.

    What the agent has in their places is taken away, whatever it is. Errors: WorkspaceSpoiled."""
    if folder:
        await _prepare(workspace, _removal(shlex.quote(folder)))
    base = folder or "."
    for path, file in files.items():
        above = [shlex.quote(f"{base}/{each}") for each in reversed(PurePosixPath(path).parents)]
        place = shlex.quote(f"{base}/{path}")
        line = f"chmod u+rwx {' '.join(above)} 2>/dev/null; {_removal(place)}"
        if file.content is not None:
            mode = "755" if file.is_executable else "644"
            line = f"{{ {line}; }} && mkdir -p {above[-1]} && cat > {place} && chmod {mode} {place}"
        await _prepare(workspace, line, file.content or b"", folder and "/")


def _removal(*places: str) -> str:
    """Line that removes what is there, also from folders that nobody may write to."""
    line = f"rm -rf {' '.join(places)}"
    return f"{line} || {{ chmod -R u+rwx {' '.join(places)}; {line}; }}"


async def _prepare(workspace: Workspace, line: str, stdin: bytes = b"", folder: str = "/") -> None:
    """Run what only the agent's changes can make fail. Errors: WorkspaceSpoiled."""
    result = await workspace.run(Command(line, stdin=stdin, folder=folder))
    if result.ending != "ok":
        raise WorkspaceSpoiled(result.output.strip()[-200:])


async def _run(
    workspace: Workspace, line: str, fault: str, stdin: bytes = b"", output: int | None = None
) -> CommandResult:
    """Result of a command that must succeed. Errors: SandboxFailed with the fault."""
    result = await workspace.run(Command(line, stdin=stdin, output=output))
    if result.ending != "ok" or result.num_dropped:
        raise SandboxFailed(f"{fault}: {result.output.strip()[-200:] or result.ending}")
    return result


# checks


async def _written_reward(workspace: Workspace, checks: Checks, seconds: float) -> float:
    """Number from 0 to 1 that the tests leave; 0 where they leave none. Errors: WorkspaceSpoiled.

    Source: the verifier of Harbor's tasks, which leaves reward.txt, or reward.json."""
    file = PurePosixPath(checks.reward_file)
    parent, *places = (shlex.quote(str(place)) for place in (file.parent, file, file.with_suffix(".json")))
    await _prepare(workspace, f"chmod u+rwx {parent} 2>/dev/null; {_removal(*places)} && mkdir -p {parent}")
    line = f"cd {shlex.quote(workspace.folder)} || exit; {checks.test_command}"
    await workspace.run(Command(line, folder="/", seconds=seconds))
    left = await workspace.run(Command(f"cat {places[0]} 2>/dev/null || cat {places[1]}", folder="/"))
    return _reward_in(left.raw_output) if left.ending == "ok" else 0.0


def _reward_in(left: bytes) -> float:
    try:
        value = json.loads(left)
        reward = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0.0
    return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0


async def _shares(evaluated: Workspace, checks: Checks, seconds: float) -> dict[When, float]:
    """Share of the checks that pass, of those that must turn green and of those that must stay so."""
    passed: dict[When, list[bool]] = {when: [] for when in WHEN}
    for call, passes in zip(checks.calls, await _run_calls(evaluated, checks.calls, seconds), strict=True):
        passed[call.when].append(passes)
    for when in WHEN:
        if checks.tests[when]:
            passed[when].append(await _run_tests(evaluated, checks.test_command, checks.tests[when], seconds))
    return {when: sum(passed[when]) / len(passed[when]) if passed[when] else 1.0 for when in WHEN}


async def _run_tests(workspace: Workspace, command: str, names: Sequence[str], seconds: float) -> bool:
    """Whether all of them pass, within their time; in several runs where one line would be too long."""
    deadline = time.monotonic() + seconds
    for part in _parts(names):
        remaining = deadline - time.monotonic()
        line = f"{command} {' '.join(part)}"
        if remaining <= 0 or (await workspace.run(Command(line, seconds=remaining))).ending != "ok":
            return False
    return True


def _parts(names: Sequence[str]) -> Iterator[list[str]]:
    """Names for a shell, as many together as a line takes."""
    part: list[str] = []
    size = 0
    for name in map(shlex.quote, names):
        size += len(name.encode(errors="surrogateescape")) + 1
        if part and size > _MOST_NAMES:
            yield part
            part, size = [], len(name.encode(errors="surrogateescape")) + 1
        part.append(name)
    yield part


async def _run_calls(workspace: Workspace, calls: Sequence[CallCheck], seconds: float) -> list[bool]:
    if not calls:
        return []
    asked = json.dumps([(call.function, call.arguments) for call in calls]).encode()
    line = f"python3 -I -B -c {shlex.quote(_DRIVER)}"
    result = await workspace.run(Command(line, stdin=asked, seconds=seconds, output=_MOST_BYTES))
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
