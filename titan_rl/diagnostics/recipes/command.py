"""``titan-rl recipe list | run NAME | report NAME RUN``: published experiments, and reports that compare runs."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_rl.config.command_line import EXIT_OK
from titan_rl.config.errors import ConfigError
from titan_rl.config.io.printable import printable, say
from titan_rl.config.load import load_config, nearest
from titan_rl.config.sections.schema import Config
from titan_rl.data.storage.files import replace_text
from titan_rl.diagnostics.bench.harness import machine
from titan_rl.diagnostics.bench.memory_watch import memory_watch
from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch
from titan_rl.diagnostics.recipes.picture import plot_report
from titan_rl.diagnostics.recipes.recipe import NOT_MEASURED, Recipe, Variant, find_recipe, shipped_recipes
from titan_rl.diagnostics.recipes.report import RecipeRun, markdown, observed_rows, report_files
from titan_rl.diagnostics.recipes.variants import check_variant, variant_of
from titan_rl.records.run_directory.rundir import existing_run_dir, run_dir_to_resume
from titan_rl.train import train

ACTIONS = ("list", "run", "report")
_WATCH_SECONDS = 10.0
"""Seconds between measurements of memory, which go through all processes."""
_MACHINE_KEYS = ("cores", "cpu", "memory_gib")


def recipe(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> int:
    """Exit code of the command. Errors: ConfigError, before anything starts."""
    if options.action not in ACTIONS:
        raise ConfigError(f"recipe {options.action!r} is unknown: {nearest(options.action, ACTIONS)}")
    _check_arguments(options, overrides)
    if options.action == "list":
        return list_recipes(as_json=options.json)
    found = find_recipe(options.name)
    if options.action == "report":
        return _report_alone(_recorded_run(found, options.variant, options.run))
    return run(found, found.variant(options.variant), overrides, resume=options.resume)


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
    if options.action == "list" and options.variant is not None:
        raise ConfigError("recipe list prints every variant: leave out --variant")
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
    described = {"recipe": each.name, "about": each.expected.about, "variant": variant.name, "gpus": variant.gpus}
    measured = [each.expected.curves[label].source for label in variant.measured]
    return described | {"toml": str(each.toml(variant)), "metric": variant.metric, "measured": measured}


def _listed(each: Recipe) -> Iterator[str]:
    yield f"{each.name}: {each.expected.about}"
    for variant in each.expected.variants:
        where = f"{variant.gpus} GPU{'s' * (variant.gpus > 1)}" if variant.gpus else "CPU"
        references = " and ".join(variant.reference_curves) or "nothing published"
        measured = "measured here" if variant.measured else f"{NOT_MEASURED} here"
        yield f"    {variant.name:30}{where:8}reference: {references}; {measured}"


def run(found: Recipe, variant: Variant, overrides: dict[str, dict[str, Any]], *, resume: bool) -> int:
    """Train as the variant's TOML says, and report; the exit code is the run's. Errors: ConfigError, before it
    starts."""
    toml = found.toml(variant)
    config = load_config(toml, overrides, with_models=False)
    root = _run_dir(config, toml, resume=resume)
    overrides = overrides | {"run": overrides.get("run", {}) | {"dir": str(root)}}
    if config.hosts.is_on:  # the process ends with its last host
        say(f"after the run, for its report: titan-rl recipe report {found.folder} {root} --variant {variant.name}")
    with memory_watch(_WATCH_SECONDS) as memory, gpu_watch(_WATCH_SECONDS) as gpu_mib:
        code = train(str(toml), overrides, resume)
    if not (root / "config.json").is_file():  # a mistake, which was told, kept it from the beginning
        return code
    try:
        about = {name: value for name, value in machine().items() if name in _MACHINE_KEYS}
        observed = observed_rows(memory, gpu_mib, about)
        report(RecipeRun(found, variant, existing_run_dir(root, write=True), observed))
    except (ConfigError, OSError) as error:
        say(f"titan-rl: {root} has no report: {printable(str(error))}", sys.stderr)
    return code


def _run_dir(config: Config, toml: Path, *, resume: bool) -> Path:
    """Run directory that the run will have. Errors: ConfigError if there is none to resume."""
    if resume:
        return run_dir_to_resume(config, str(toml)).root
    return Path(config.run.dir or f"runs/{toml.stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def _recorded_run(found: Recipe, name: str | None, root: Path) -> RecipeRun:
    """Run of a directory, of the variant that is named or that its settings are of. Errors: ConfigError."""
    variant = found.variant(name)
    recorded = RecipeRun(found, variant, existing_run_dir(root, write=True))
    if not recorded.run_dir.config.is_file():
        raise ConfigError(f"{root} holds no run: give a run directory, such as runs/{variant.name}-<date>")
    if name is None:
        return RecipeRun(found, variant_of(found, recorded.settings, root), recorded.run_dir)
    check_variant(found, variant, recorded.settings, root)
    return recorded


def _report_alone(of_run: RecipeRun) -> int:
    """Errors: ConfigError."""
    try:
        return report(of_run)
    except OSError as error:
        raise ConfigError(f"cannot write the report of {of_run.run_dir.root}: {error.strerror or error}") from None


def report(of_run: RecipeRun) -> int:
    """Write report.md and report.png into the run directory. Errors: ConfigError; OSError."""
    path, picture = report_files(of_run.run_dir.root)
    is_drawn = plot_report(of_run, picture)
    replace_text(path, markdown(of_run, picture.name if is_drawn else None))
    say(f"report {path}" + (f"  picture of the curves {picture}" if is_drawn else ""))
    return EXIT_OK
