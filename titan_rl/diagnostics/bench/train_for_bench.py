"""A training run in a temporary directory, and the times of its steps."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.shipped import shipped
from titan_rl.records.metrics import read_metrics

_NUM_WARMING = 2
"""The first steps, which are left out of the medians."""


@dataclass(frozen=True)
class BenchRun:
    seconds: dict[str, float]
    """Median of each phase."""
    seconds_to_first_step: float
    response_length: float


def _arguments(tables: dict[str, Any], prefix: str = "-") -> list[str]:
    arguments = []
    for key, value in tables.items():
        name = f"{prefix}-{key}" if prefix == "-" else f"{prefix}.{key}"
        if isinstance(value, dict):
            arguments += _arguments(value, name)
        else:
            arguments += [name, json.dumps(value)]
    return arguments


@contextmanager
def trained(
    config: str,
    fixed: dict[str, Any],
    overrides: dict[str, Any],
    command: tuple[str, ...] = ("titan_rl.cli", "train"),
    watch: Callable[[Path], AbstractContextManager] = nullcontext,
) -> Iterator[Path]:
    """The directory of a finished run. ``command``: the module that runs it, and its first arguments. ``watch`` is
    given the directory, and held while the run lasts.

    Errors: ConfigError if the run could not start; RuntimeError if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        root = Path(folder) / "run"
        tables = [*_arguments(fixed), *_arguments(overrides), "--run.dir", str(root)]
        arguments = [sys.executable, "-m", *command, str(shipped()[config]), *tables]
        with watch(root):
            done = subprocess.run(arguments, capture_output=True, text=True)
        if done.returncode == 2:
            raise ConfigError(done.stderr.strip().removeprefix("titan-rl: "))
        if done.returncode:
            raise RuntimeError(
                f"the run ended with exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        yield root


def train_for_bench(config: str, fixed: dict[str, Any], overrides: dict[str, Any]) -> BenchRun:
    """Errors: those of ``trained``."""
    with trained(config, fixed, overrides) as root:
        return bench_run(root, steps_of(root))


def steps_of(root: Path) -> list[dict[str, Any]]:
    """Records of the steps, without the first ones."""
    return [record for record in read_metrics(root) if "reward" in record][_NUM_WARMING:]


def bench_run(root: Path, records: list[dict[str, Any]]) -> BenchRun:
    summary = json.loads((root / "summary.json").read_text())
    names = [name.removeprefix("seconds_") for name in records[0] if name.startswith("seconds_")]
    return BenchRun(
        seconds={name: statistics.median(record[f"seconds_{name}"] for record in records) for name in names},
        seconds_to_first_step=summary["seconds_to_first_step"],
        response_length=statistics.mean(record["response_length"] for record in records),
    )
