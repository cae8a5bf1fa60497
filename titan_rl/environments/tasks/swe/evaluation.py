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
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.values import same
from titan_rl.environments.sandbox.workspace.command import Command, CommandResult, Workspace
from titan_rl.environments.sandbox.workspace.images import check_path
from titan_rl.environments.tasks.swe.rows import WHEN, CallCheck, Checks, When

_MOST_BYTES = 16 << 20
"""Of a test file."""
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


async def resolution_reward(
    workspace: Workspace, begin: Callable[[], Awaitable[Workspace]], checks: Checks, settings: EvaluationSettings
) -> float:
    """Reward of what an agent left in a workspace, which takes no command any more. ``begin``: opens one as it was
    before the agent. Errors: SandboxFailed."""
    test_files: Mapping[str, bytes | None] = checks.test_files
    if checks.test_patch:
        test_files = {**test_files, **await _patched(begin, checks.test_patch)}
    evaluated = await (workspace.fork() if checks.reward_file else workspace.fork_folder())
    try:
        if checks.test_folder:
            await _run(
                evaluated, f"rm -rf {shlex.quote(checks.test_folder)}", "the folder of tests could not be emptied"
            )
        for path, content in test_files.items():
            await _write(evaluated, f"{checks.test_folder or '.'}/{path}", content)
        if checks.reward_file:
            return await _written_reward(evaluated, checks, settings.seconds)
        shares = await _shares(evaluated, checks, settings.seconds)
    finally:
        await evaluated.close()
    if shares["PASS_TO_PASS"] < 1.0:
        return 0.0
    green = shares["FAIL_TO_PASS"]
    return green if settings.credit == "each" else float(green == 1.0)


async def _patched(begin: Callable[[], Awaitable[Workspace]], patch: str) -> dict[str, bytes | None]:
    """Files that a patch touches, as it leaves them in a repository that no agent has seen. None: it deletes it.

    Errors: SandboxFailed."""
    workspace = await begin()
    stdin, files = patch.encode(errors="surrogateescape"), {}
    try:
        why = "the row's test_patch does not fit its repository"
        listed = await _run(workspace, "git apply --numstat -z -", why, stdin)
        await _run(workspace, "git apply --whitespace=nowarn -", why, stdin)
        for path in _paths_of(listed.raw_output):
            quoted = shlex.quote(f"./{path}")
            if (await workspace.run(Command(f"test -f {quoted}"))).ending == "ok":
                content = await _run(
                    workspace, f"cat {quoted}", f"the test file {path} cannot be read", output=_MOST_BYTES
                )
                files[path] = content.raw_output
            else:
                files[path] = None
    finally:
        await workspace.close()
    return files


def _paths_of(listed: bytes) -> list[str]:
    """Paths of ``git apply --numstat -z``, old and new ones where they differ. Errors: SandboxFailed."""
    fields = [field.rpartition(b"\t")[2] for field in listed.split(b"\0")]
    paths = [field.decode(errors="surrogateescape") for field in fields if field]
    try:
        for path in paths:
            check_path(path)
    except ConfigError as error:
        raise SandboxFailed(f"the row's test_patch: {error}") from None
    return paths


async def _write(workspace: Workspace, path: str, content: bytes | None) -> None:
    """Errors: SandboxFailed. (A link that the agent has laid there is taken away, and so is a folder.)"""
    place, parent = shlex.quote(path), shlex.quote(str(PurePosixPath(path).parent))
    line = f"rm -rf {place}" if content is None else f"rm -rf {place} && mkdir -p {parent} && cat > {place}"
    result = await workspace.run(Command(line, stdin=content or b""))
    if result.ending == "timeout":
        raise SandboxFailed(f"the test file {path} could not be written: {result.output.strip()[:200]}")


async def _run(
    workspace: Workspace, line: str, fault: str, stdin: bytes = b"", output: int | None = None
) -> CommandResult:
    """Result of a command that must succeed. Errors: SandboxFailed with the fault."""
    result = await workspace.run(Command(line, stdin=stdin, output=output))
    if result.ending != "ok" or result.num_dropped:
        raise SandboxFailed(f"{fault}: {result.output.strip()[-200:] or result.ending}")
    return result


async def _written_reward(workspace: Workspace, checks: Checks, seconds: float) -> float:
    """Number from 0 to 1 that the tests leave; 0 where they leave none.

    Source: the verifier of Harbor's tasks, which leaves reward.txt, or reward.json."""
    file = PurePosixPath(checks.reward_file)
    places = [shlex.quote(str(place)) for place in (file, file.with_suffix(".json"))]
    await _run(
        workspace,
        f"rm -rf {' '.join(places)} && mkdir -p {shlex.quote(str(file.parent))}",
        "there is no place for the reward",
    )
    await workspace.run(Command(checks.test_command, seconds=seconds))
    left = await workspace.run(Command(f"cat {places[0]} 2>/dev/null || cat {places[1]}"))
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
            part, size = [], len(name) + 1
        part.append(name)
    yield part


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
