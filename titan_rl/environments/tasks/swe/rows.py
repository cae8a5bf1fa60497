"""Rows of software engineering, by SWE-bench's names for what it has.

    problem_statement   the issue
    files | workspace   repository: texts by path; or the path of a folder, a tar archive or an OCI layout, below a
                        folder of run.plugin_path
    folder              where the repository is in an archive, or in a layout that does not say so
    setup               command that prepares it, once for all samples of a prompt
    test_files          texts by path, laid over the repository before tests run: no agent has seen or changed them
    test_patch          unified diff of the repository as it was; the files that it touches are laid over it, too
    test_command        what runs tests, behind which their names are put; exit code 0 means that all pass
    FAIL_TO_PASS        names of tests that the change must turn green; PASS_TO_PASS: of those that must stay so
    calls               {function, arguments, expected, when}: checks by value; ``when`` is one of these two names
    reward_file         of test_command, instead of names and calls: where it leaves a number, or JSON with "reward";
                        test_folder is then where test_files are laid
    solution            commands of a worked example; or patch, a unified diff

Names of tests and calls may be JSON in a text, as public sets have them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.rows.row_fields import encodable, shown, text
from titan_rl.environments.sandbox.workspace.command import MOST_COMMAND_BYTES
from titan_rl.environments.sandbox.workspace.images import (
    Image,
    check_folder,
    check_path,
    image_of_archive,
    image_of_files,
    image_of_folder,
    image_of_layout,
    with_real_folder,
)

When = Literal["FAIL_TO_PASS", "PASS_TO_PASS"]
WHEN: tuple[When, ...] = ("FAIL_TO_PASS", "PASS_TO_PASS")
TEST_COMMAND = "python3 -m unittest"
_MOST_TESTS = 10_000
_LONGEST_NAME = 2000
_OPTIONAL = ("test_command", "setup", "test_patch", "folder", "test_folder", "reward_file")
_COMMANDS = ("test_command", "setup")
DEFAULTS = ("workspace", *_OPTIONAL)
"""Columns that ``task.options.defaults`` may give."""


@dataclass(frozen=True)
class CallCheck:
    """Call of a function of the repository, with the value that it must give."""

    function: str
    """``package.module:name``"""
    arguments: list[Any]
    expected: Any
    when: When


@dataclass(frozen=True)
class Checks:
    """What decides whether an issue is resolved."""

    tests: Mapping[When, Sequence[str]]
    test_command: str
    test_files: Mapping[str, bytes]
    calls: Sequence[CallCheck]
    test_patch: str = ""
    test_folder: str = ""
    """Of ``test_files``; empty: the repository's."""
    reward_file: str = ""

    @property
    def has_any(self) -> bool:
        """Whether something has to turn green."""
        has_call = any(call.when == "FAIL_TO_PASS" for call in self.calls)
        return bool(self.tests["FAIL_TO_PASS"] or self.reward_file) or has_call


@dataclass(frozen=True)
class SweRow:
    """Row, read."""

    issue: str
    checks: Checks
    setup: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    workspace: str = ""
    folder: str = ""

    def image(self, folders: Sequence[str]) -> Image:
        """Image of the repository. ``folders``: where a path is looked for. Errors: ConfigError."""
        image = self._image(folders)
        if image.folder == "/" and not self.checks.reward_file:
            raise unknown_folder(self.workspace)
        return image if image.uses_host_programs else with_real_folder(image)

    def path(self, folders: Sequence[str]) -> Path:
        """Path of the workspace. Errors: ConfigError for one that is not there."""
        check_path(self.workspace)
        with suppress(OSError):  # a name that is too long
            for folder in folders:
                if (path := Path(folder) / self.workspace).exists():
                    return path
        raise ConfigError(f"the workspace {self.workspace!r:.200} is not there: looked in {', '.join(folders)}")

    def _image(self, folders: Sequence[str]) -> Image:
        """Errors: ConfigError."""
        if self.files:
            return image_of_files(self.files)
        path = self.path(folders)
        if path.is_dir() and not (path / "index.json").is_file():
            return image_of_folder(path)
        image = image_of_layout(path) if path.is_dir() else image_of_archive(path)
        return replace(image, folder=self.folder) if self.folder else image


def unknown_folder(workspace: str) -> ConfigError:
    """Error for a workspace whose repository may be anywhere."""
    return ConfigError(
        f"the workspace {workspace!r} does not say where in it the repository is, which alone is judged: give the "
        f"column 'folder', such as '/testbed'"
    )


def read_row(place: str, columns: Mapping[str, Any]) -> SweRow:
    """Read a row. Errors: ConfigError with its place."""
    issue = text(place, "problem_statement", columns.get("problem_statement"))
    files = _files(place, "files", columns.get("files"))
    workspace = columns.get("workspace") or ""
    if not isinstance(workspace, str) or bool(files) == bool(workspace):
        raise ConfigError(f"{place}: a repository is 'files', texts by path, or 'workspace', a path: give one of them")
    tests: dict[When, list[str]] = {when: _names(place, when, columns.get(when)) for when in WHEN}
    command, setup, patch, *places = (_optional(place, name, columns) for name in _OPTIONAL)
    folder, test_folder, reward_file = (_folder(place, each) for each in places)
    if "/" in (test_folder, reward_file) or test_folder.split("/")[1:2] in (["proc"], ["dev"], ["sys"]):
        raise ConfigError(f"{place}: 'test_folder' and 'reward_file' are paths of the tests' own, such as /tests")
    test_files, calls = _files(place, "test_files", columns.get("test_files")), _calls(place, columns)
    checks = Checks(tests, command or TEST_COMMAND, test_files, calls, patch, test_folder, reward_file)
    if not checks.has_any:
        raise ConfigError(
            f"{place}: nothing has to turn green, so that every change would be right: give FAIL_TO_PASS names of "
            f"tests, 'calls' with when = 'FAIL_TO_PASS', or a 'reward_file'"
        )
    return SweRow(issue, checks, setup, files, workspace, folder)


def with_defaults(place: str, columns: dict[str, Any], defaults: Mapping[str, str]) -> dict[str, Any]:
    """Columns, and those that a row lacks; in a path of these, ``{name}`` is the row's column. Errors: ConfigError."""

    def of_row(match: re.Match[str]) -> str:
        value = columns.get(match[1])
        if not isinstance(value, str) or not value:
            raise ConfigError(
                f"{place}: the row has no text in the column {match[1]!r} of task.options.defaults.workspace"
            )
        return value

    added = {name: value for name, value in defaults.items() if not columns.get(name)}
    if "workspace" in added:
        if columns.get("files"):
            del added["workspace"]
        else:
            added["workspace"] = re.sub(r"\{(\w+)\}", of_row, added["workspace"])
    return columns | added


def check_defaults(defaults: Mapping[str, str]) -> None:
    """Errors: ConfigError for a column that is none of ours."""
    if (unknown := next((name for name in defaults if name not in DEFAULTS), None)) is not None:
        raise ConfigError(f"task.options.defaults has {unknown!r}: {nearest(unknown, DEFAULTS)}")


def _folder(place: str, value: str) -> str:
    """Errors: ConfigError."""
    try:
        return check_folder(value) if value else ""
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _optional(place: str, name: str, columns: Mapping[str, Any]) -> str:
    """Errors: ConfigError."""
    value = columns.get(name) or ""
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name!r} is {shown(value)}: give text, or leave it out")
    if name in _COMMANDS and ("\0" in value or len(value.encode(errors="replace")) > MOST_COMMAND_BYTES // 3):
        raise ConfigError(f"{place}: {name!r} has a NUL, or more bytes than a command can have")
    return encodable(place, name, value)


def solution_of(place: str, columns: Mapping[str, Any]) -> list[str]:
    """Commands of a row's worked example. Errors: ConfigError without one."""
    commands = columns.get("solution")
    if isinstance(commands, list) and commands and all(isinstance(each, str) and each for each in commands):
        return commands
    if isinstance(patch := columns.get("patch"), str) and patch:
        lines = patch.strip("\n")
        return [f"git apply - <<'END_OF_PATCH'\n{lines}\nEND_OF_PATCH"]
    raise ConfigError(
        f"{place}: no 'solution', a list of commands, and no 'patch' to learn from: set sft.steps = 0 to leave SFT out"
    )


def _files(place: str, name: str, value: Any) -> dict[str, bytes]:
    """Errors: ConfigError."""
    if value is None:
        return {}
    value = _json(place, name, value)
    if not isinstance(value, dict) or not all(isinstance(content, str) for content in value.values()):
        raise ConfigError(f"{place}: {name!r} must be texts by path")
    for path in value:
        try:
            check_path(path)
        except ConfigError as error:
            raise ConfigError(f"{place}: {name!r}: {error}") from None
    try:
        return {path: content.encode(errors="surrogateescape") for path, content in value.items()}
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: {name!r} holds half a character (a lone surrogate)") from None


def _names(place: str, name: str, value: Any) -> list[str]:
    """Names of tests; public sets have them as JSON in a text. Errors: ConfigError."""
    value = _json(place, name, value or [])
    if not isinstance(value, list) or len(value) > _MOST_TESTS or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{place}: {name!r} must be a list of at most {_MOST_TESTS} names of tests")
    if wrong := next((each for each in value if len(encodable(place, name, each)) > _LONGEST_NAME), None):
        raise ConfigError(f"{place}: {name!r}: {wrong!r:.60}... is longer than a name of a test is")
    if wrong := next((each for each in value if each.startswith("-") or "\0" in each), None):
        raise ConfigError(f"{place}: {name!r}: {wrong!r:.60} is no name of a test: it would be taken for an option")
    return value


def _json(place: str, name: str, value: Any) -> Any:
    """Errors: ConfigError."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {name!r} is no JSON: {error}") from None


def _calls(place: str, columns: Mapping[str, Any]) -> list[CallCheck]:
    """Errors: ConfigError."""
    value = _json(place, "calls", columns.get("calls") or [])
    if not isinstance(value, list) or len(value) > _MOST_TESTS:
        raise ConfigError(f"{place}: 'calls' must be a list of at most {_MOST_TESTS}")
    return [_call(place, each) for each in value]


def _call(place: str, value: Any) -> CallCheck:
    """Errors: ConfigError."""
    form = "{function: 'package.module:name', arguments: [...], expected: ..., when: 'FAIL_TO_PASS' | 'PASS_TO_PASS'}"
    if not isinstance(value, dict) or set(value) != {"function", "arguments", "expected", "when"}:
        raise ConfigError(f"{place}: each of 'calls' is {form}")
    function, arguments, when = value["function"], value["arguments"], value["when"]
    module, _, name = function.partition(":") if isinstance(function, str) else ("", "", "")
    is_reference = all(part.isidentifier() for part in (*module.split("."), name))
    if not is_reference or not isinstance(arguments, list) or when not in WHEN:
        raise ConfigError(f"{place}: one of 'calls' has no function, no list of arguments or no 'when': it is {form}")
    return CallCheck(function, arguments, value["expected"], when)
