"""Directories of tasks in Harbor's form, as rows (rows.py).

    NAME/instruction.md        the issue
    NAME/task.toml             [environment] docker_image; [metadata] is kept
    NAME/tests/                laid at /tests; test.sh leaves a number in /logs/verifier/reward.txt
    NAME/solution/solve.sh     worked example, if there is one

Images are not built here: ``task.options.defaults.workspace`` says where they lie, by {instance_id}, the directory's
name, or {docker_image}. Source: harborframework.com/docs/tasks, schema version 1.1.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import RefusedFile, read_text
from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_files import RawRow, read_raw_rows

_MOST_BYTES = 16 << 20
"""Of a file."""
_MOST_FILES = 1000
"""Of a task's tests."""


def read_file_or_tasks(path: Path, name: str) -> Iterator[RawRow]:
    """Rows of a data file, or of a folder of task directories. Errors: ConfigError; OSError."""
    if (path / "task.toml").is_file():
        raise ConfigError(f"{path} is one task: give the folder that its directory is in")
    directories = sorted({file.parent for form in ("task.toml", "instruction.md") for file in path.glob(f"*/{form}")})
    if not path.is_dir() or not directories:
        return read_raw_rows(path, name)
    return ((f"{name}/{directory.name}", _columns(directory)) for directory in directories)


def _columns(directory: Path) -> dict[str, Any]:
    """Errors: ConfigError."""
    settings = _settings(directory / "task.toml")
    columns: dict[str, Any] = {
        "instance_id": directory.name,
        "problem_statement": _text(directory / "instruction.md"),
        "test_files": _files(directory / "tests"),
        "test_folder": "/tests",
        "test_command": "bash /tests/test.sh",
        "reward_file": "/logs/verifier/reward.txt",
        "metadata": settings.get("metadata", {}),
    }
    environment = settings.get("environment", {})
    if isinstance(environment, dict) and isinstance(image := environment.get("docker_image"), str):
        columns["docker_image"] = image
    if (solution := directory / "solution" / "solve.sh").is_file():
        columns["solution"] = [_text(solution)]
    return columns


def _settings(file: Path) -> dict[str, Any]:
    """Errors: ConfigError."""
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None


def _files(folder: Path) -> dict[str, str]:
    """Files below a folder, by their paths there. Errors: ConfigError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if folder / "test.sh" not in files or len(files) > _MOST_FILES:
        raise ConfigError(f"{folder} must have test.sh, and at most {_MOST_FILES} files")
    return {str(path.relative_to(folder)): _text(path) for path in files}


def _text(file: Path) -> str:
    """Errors: ConfigError."""
    try:
        return read_text(file, _MOST_BYTES, errors="surrogateescape")
    except (RefusedFile, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
