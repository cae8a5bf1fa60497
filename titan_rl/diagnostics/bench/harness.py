"""``titan-rl bench NAME``: figures that anyone can measure again. The result is one JSON object:
the rows, and the machine.

A row may have a bar, and then says whether it is met. Timings are medians within one run.
"""

import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any

from titan_rl.config.load import ConfigError, nearest
from titan_rl.mesh.resources.cores import available_cores
from titan_rl.records.run_directory.rundir import package_versions

BENCHES = {
    "step": "titan_rl.diagnostics.bench.steps.step",
    "step-smollm2": "titan_rl.diagnostics.bench.steps.step_smollm2",
    "beside-trl": "titan_rl.diagnostics.bench.steps.beside_trl",
    "controller": "titan_rl.diagnostics.bench.steps.controller_rate",
    "session": "titan_rl.diagnostics.bench.steps.session",
    "generate": "titan_rl.diagnostics.bench.models.generate",
    "admission": "titan_rl.diagnostics.bench.models.admission",
    "speculation": "titan_rl.diagnostics.bench.models.speculation",
    "weight-sync": "titan_rl.diagnostics.bench.weights.weight_sync",
    "between-hosts": "titan_rl.diagnostics.bench.weights.between_hosts",
    "differences": "titan_rl.diagnostics.bench.weights.version_differences",
    "learning": "titan_rl.diagnostics.bench.learning.tomls",
    "learning-smollm2": "titan_rl.diagnostics.bench.learning.smollm2",
    "off-policy": "titan_rl.diagnostics.bench.learning.off_policy",
    "protection": "titan_rl.diagnostics.bench.faults.protection",
    "replacement": "titan_rl.diagnostics.bench.faults.replacement",
    "sandbox": "titan_rl.diagnostics.bench.faults.sandbox",
    "workspaces": "titan_rl.diagnostics.bench.faults.workspaces",
    "plan": "titan_rl.diagnostics.bench.planning.forecasts",
    "growth": "titan_rl.diagnostics.bench.planning.growth",
    "colocated": "titan_rl.diagnostics.bench.steps.colocated",
    "overlap": "titan_rl.diagnostics.bench.steps.overlap",
    "helpers": "titan_rl.diagnostics.bench.models.helper_generators",
    "slow-scorer": "titan_rl.diagnostics.bench.faults.slow_scorer",
    "kernels": "titan_rl.diagnostics.bench.models.kernels",
    "constant-answers": "titan_rl.diagnostics.bench.models.constant_answers",
    "model-directories": "titan_rl.diagnostics.bench.models.model_directories",
    "serve": "titan_rl.diagnostics.bench.serving.sampling",
    "watch": "titan_rl.diagnostics.bench.page.watch",
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
    """Row of one figure; with ``bar``, also whether it is met."""
    result = {"name": name, "value": value, "unit": unit, **details}
    if bar is not None:
        result |= {"bar": f"{'<=' if at_most else '>='} {bar}", "met": value <= bar if at_most else value >= bar}
    return result


def run_bench(name: str, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Bench by name. Errors: ConfigError for an unknown name."""
    if name not in BENCHES:
        raise ConfigError(f"bench {name!r} is unknown: {nearest(name, BENCHES)}")
    run: Callable = import_module(BENCHES[name]).run
    return {"bench": name, "rows": run(overrides), "machine": machine()}
