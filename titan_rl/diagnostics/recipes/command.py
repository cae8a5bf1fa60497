"""``titan-rl recipe list | run NAME | report NAME RUN``: a published experiment, and a run held beside it."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_rl.config.command_line import EXIT_OK
from titan_rl.config.errors import ConfigError
from titan_rl.config.io.printable import say
from titan_rl.config.load import load_config, nearest
from titan_rl.data.storage.files import replace_text
from titan_rl.diagnostics.bench.harness import machine
from titan_rl.diagnostics.bench.memory_watch import memory_watch
from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch
from titan_rl.diagnostics.recipes.picture import plot_report
from titan_rl.diagnostics.recipes.recipe import NOT_MEASURED, Recipe, Variant, find_recipe, shipped_recipes
from titan_rl.diagnostics.recipes.report import Measured, RecipeRun, markdown, report_files
from titan_rl.records.run_directory.rundir import existing_run_dir, run_dir_to_resume
from titan_rl.train import train

ACTIONS = ("list", "run", "report")
_WATCH_SECONDS = 10.0
"""Between two looks at the memory of all processes."""
_OF_MACHINE = ("cores", "cpu", "memory_gib")


def recipe(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> int:
    """Exit code of the command. Errors: ConfigError, before anything starts."""
    if options.action not in ACTIONS:
        raise ConfigError(f"recipe {options.action!r} is unknown: {nearest(options.action, ACTIONS)}")
    _check_arguments(options, overrides)
    if options.action == "list":
        return list_recipes(as_json=options.json)
    found = find_recipe(options.name)
    variant = found.variant(options.variant)
    if options.action == "report":
        return report(RecipeRun(found, variant, existing_run_dir(options.run, write=True)))
    return run(found, variant, overrides, resume=options.resume)


def _check_arguments(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> None:
    """Errors: ConfigError for an argument that is missing, or that another action has."""
    takes = {"list": (), "run": ("name",), "report": ("name", "run")}[options.action]
    for name in ("name", "run"):
        if (getattr(options, name) is not None) != (name in takes):
            what = " ".join(("titan-rl recipe", options.action, *(each.upper() for each in takes)))
            raise ConfigError(f"recipe {options.action} is {what}: `titan-rl recipe list` prints the names")
    if options.action != "run" and (overrides or options.resume):
        given = f"--{min(overrides)}.*" if overrides else "--resume"
        raise ConfigError(f"recipe {options.action} starts no run: leave out {given}")
    if options.json and options.action != "list":
        raise ConfigError(f"recipe {options.action} prints no JSON: leave out --json")


def list_recipes(*, as_json: bool) -> int:
    """Print recipes with their variants."""
    recipes = shipped_recipes().values()
    if as_json:
        say(json.dumps([_described(each, variant) for each in recipes for variant in each.expected.variants]))
    else:
        say("\n".join(line for each in recipes for line in _listed(each)))
    return EXIT_OK


def _described(each: Recipe, variant: Variant) -> dict[str, Any]:
    ours = [curve.source for curve in variant.ours]
    described = {"recipe": each.name, "about": each.expected.about, "variant": variant.name, "gpus": variant.gpus}
    return described | {"toml": str(each.toml(variant)), "metric": variant.metric, "measured": ours}


def _listed(each: Recipe) -> Iterator[str]:
    yield f"{each.name}: {each.expected.about}"
    for variant in each.expected.variants:
        where = f"{variant.gpus} GPU{'s' * (variant.gpus > 1)}" if variant.gpus else "CPU"
        curves = " and ".join(curve.label for curve in variant.curves) or "nothing published"
        ours = "measured here" if variant.ours else f"{NOT_MEASURED} here"
        yield f"    {variant.name:26}{where:8}beside {curves}; {ours}"


def run(found: Recipe, variant: Variant, overrides: dict[str, dict[str, Any]], *, resume: bool) -> int:
    """Train as the variant's TOML says, and report; the exit code is the run's. Errors: ConfigError."""
    toml = found.toml(variant)
    root = _run_dir(toml, overrides, resume=resume)
    overrides = overrides | {"run": overrides.get("run", {}) | {"dir": str(root)}}
    with memory_watch(_WATCH_SECONDS) as memory, gpu_watch(_WATCH_SECONDS) as gpu_mib:
        code = train(str(toml), overrides, resume)
    if not (root / "config.json").is_file():  # a mistake, which was told, kept it from the beginning
        return code
    of_machine = {name: value for name, value in machine().items() if name in _OF_MACHINE}
    measured = Measured(memory.mib, memory.by_process, gpu_mib, of_machine)
    report(RecipeRun(found, variant, existing_run_dir(root, write=True), measured))
    return code


def _run_dir(toml: Path, overrides: dict[str, dict[str, Any]], *, resume: bool) -> Path:
    """Run directory that the run will have. Errors: ConfigError for wrong settings, or if there is none to resume."""
    config = load_config(toml, overrides, with_models=False)
    if resume:
        return run_dir_to_resume(config, str(toml)).root
    return Path(config.run.dir or f"runs/{toml.stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def report(of_run: RecipeRun) -> int:
    """Write report.md and report.png into the run directory. Errors: ConfigError if no run is there."""
    root = of_run.run_dir.root
    if not of_run.run_dir.config.is_file():
        raise ConfigError(f"{root} holds no run: give a run directory, such as runs/{of_run.variant.name}-<date>")
    text, picture = report_files(root)
    has_picture = plot_report(of_run, picture)
    replace_text(text, markdown(of_run, picture.name if has_picture else None))
    say(f"report {text}" + (f"  curve beside the published ones {picture}" if has_picture else ""))
    return EXIT_OK
