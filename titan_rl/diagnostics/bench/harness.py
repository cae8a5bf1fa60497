"""``titan-rl bench NAME``: figures that anyone can measure again. The result is one JSON object:
the rows, and the machine.

A row may have a bar, and then says whether it is met. Timings are medians within one run.
"""

import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any

from titan_rl.config.load import ConfigError, nearest
from titan_rl.mesh.launch.placement import available_cores
from titan_rl.records.rundir import package_versions

BENCHES = {
    "step": "titan_rl.diagnostics.bench.step",
    "step-smollm2": "titan_rl.diagnostics.bench.step_smollm2",
    "beside-trl": "titan_rl.diagnostics.bench.beside_trl",
    "controller": "titan_rl.diagnostics.bench.controller_rate",
    "session": "titan_rl.diagnostics.bench.session",
    "generate": "titan_rl.diagnostics.bench.generate",
    "weight-sync": "titan_rl.diagnostics.bench.weight_sync",
    "between-hosts": "titan_rl.diagnostics.bench.between_hosts",
    "learning": "titan_rl.diagnostics.bench.learning",
    "learning-smollm2": "titan_rl.diagnostics.bench.learning_smollm2",
    "off-policy": "titan_rl.diagnostics.bench.off_policy",
    "protection": "titan_rl.diagnostics.bench.protection",
    "replacement": "titan_rl.diagnostics.bench.replacement",
    "sandbox": "titan_rl.diagnostics.bench.sandbox",
    "plan": "titan_rl.diagnostics.bench.forecasts",
    "colocated": "titan_rl.diagnostics.bench.colocated",
    "overlap": "titan_rl.diagnostics.bench.overlap",
    "slow-scorer": "titan_rl.diagnostics.bench.slow_scorer",
    "kernels": "titan_rl.diagnostics.bench.kernels",
    "constant-answers": "titan_rl.diagnostics.bench.constant_answers",
    "model-directories": "titan_rl.diagnostics.bench.model_directories",
    "watch": "titan_rl.diagnostics.bench.watch",
}
"""Name to module; each has ``run(overrides) -> rows``."""


def machine() -> dict[str, Any]:
    with open("/proc/meminfo") as file:
        gib = int(file.readline().split()[1]) / 2**20
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "cores": available_cores(),
        "cpu": models[0] if models else platform.machine(),
        "memory_gib": round(gib, 1),
        "python": platform.python_version(),
        "versions": package_versions(),
    }


def row(
    name: str, value: float, unit: str, bar: float | None = None, at_most: bool = True, **details: Any
) -> dict[str, Any]:
    """One figure; with ``bar``, also whether it is met."""
    result = {"name": name, "value": value, "unit": unit, **details}
    if bar is not None:
        result |= {"bar": f"{'<=' if at_most else '>='} {bar}", "met": value <= bar if at_most else value >= bar}
    return result


def run_bench(name: str, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Errors: ConfigError for an unknown name."""
    if name not in BENCHES:
        raise ConfigError(f"bench {name!r} is unknown: {nearest(name, BENCHES)}")
    run: Callable = import_module(BENCHES[name]).run
    return {"bench": name, "rows": run(overrides), "machine": machine()}
