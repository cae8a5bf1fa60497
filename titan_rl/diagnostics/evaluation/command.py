"""``titan-rl eval MODEL --suite NAME``: a model on suites, without a trainer and without a run.

Its results are a table, and a folder: for each suite a JSON of its estimates and a Parquet of every answer.
"""

import argparse
import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import MADE_MODELS, Config, TaskConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.controller.loop.suites import engine_settings
from titan_rl.controller.preflight.checks import Checked, check, read_config, resolve, tokenizer_of
from titan_rl.controller.preflight.data_checks import longest_prompt
from titan_rl.controller.wiring import Actors
from titan_rl.data.storage.files import replace_text, try_lock
from titan_rl.diagnostics.evaluation.arguments import check_file
from titan_rl.environments.rollout.suites import make_suites
from titan_rl.mesh.meshes import ALL_PARTS
from titan_rl.models.layers.rope import num_positions
from titan_rl.records.evaluations.files import write_result
from titan_rl.records.evaluations.results import SuiteResult
from titan_rl.records.evaluations.tables import table
from titan_rl.records.run_directory.path_checks import check_no_modules, check_place
from titan_rl.records.run_directory.rundir import package_versions
from titan_rl.records.run_directory.sources import find_sources
from titan_rl.records.statistics import Proportion

OF_SUITES = ("file", "prompts", "k", "samples", "temperature", "max_new_tokens")
"""Arguments that are a suite's own keys."""
_READ = {
    *("verifier", "mesh", "run.seed", "run.plugin_path", "eval.prompts", "eval.thinking_budget", "eval.suites"),
    *("model.path", "model.family", "model.chat_template", "model.images"),
    *("task.style", "task.keep_special", "task.sandbox"),
    *(f"rollout.{key}" for key in ("stop", "thinking_budget", "max_new_tokens", "max_turns", "max_retries")),
    *(f"generator.{key}" for key in ("replicas", "tensor_parallel", "dtype", "max_num_seqs", "kv_cache_gib")),
    *("generator.adaptive_max_num_seqs", "generator.quantization"),
    *("generator.gpu_memory_utilization", "generator.speculative", "generator.torch_compile", "training.seq_len"),
}
"""Sections and keys that an evaluation on suites reads."""


def evaluate(
    options: argparse.Namespace, overrides: dict[str, dict[str, Any]], held_out: Proportion | None = None
) -> int:
    """Evaluate, and write each suite's result as it ends; the exit code. ``held_out``: accuracy, to record beside.

    Errors: ConfigError before anything starts."""
    folder = _folder(options)
    checked = checked_suites(options, overrides)
    results: list[SuiteResult] = []

    def record(result: SuiteResult) -> None:
        write_result(folder, result)
        results.append(result)

    with _reserved(folder):
        asyncio.run(_evaluate(checked, record))
        found: dict[str, Any] = {"held_out": held_out.as_dict()} if held_out else {}
        found["suites"] = [result.as_dict() for result in results]
        replace_text(folder / "evaluation.json", json.dumps(_record(checked) | found, indent=2) + "\n")
    say(json.dumps(found) if options.json else f"{table(results)}\nwrote {folder}")
    failed = [result for result in results if not result.questions]
    for result in failed:
        say(f"no answer to the suite {result.name} could be scored, {result.first_failure}", sys.stderr)
    return EXIT_FAULT if failed else EXIT_OK


def checked_suites(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> Checked:
    """Checked configuration of an evaluation. Errors: ConfigError."""
    check_file(options)
    toml = options.config
    config = load_config(toml, overrides)
    if options.suite:
        _check_overrides(options, overrides)
    if config.model.path in MADE_MODELS:
        raise ConfigError("eval needs a model: give its Hugging Face directory")
    home = Path(config.model.path)
    check_no_modules(home.parent if (home.parent / "config.json").is_file() else home)  # a run directory holds models
    chooses_style = toml is None and "style" not in overrides.get("task", {})
    suites = _suites(options, config.eval.suites, style=_style(config) if chooses_style else None)
    config = _without_training(config, suites)
    if options.thinking_budget is not None:
        config = _with_budget(config, options.thinking_budget)
    if toml is None and "seq_len" not in overrides.get("training", {}):
        config = _long_enough(config)
    return check(config, keys=())


def _check_overrides(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> None:
    """Errors: ConfigError for a setting of the command line that suites do not read."""
    if options.task:
        raise ConfigError(f"--task {options.task}: suites have their own: leave it out, or use [[eval.suites]]")
    given = (f"{section}.{key}" for section, table in overrides.items() for key in table)
    if unread := next((name for name in given if not _is_read(name)), None):
        key = unread.partition(".")[2]
        own = f"; a suite's own {key} is set in [[eval.suites]]" if hasattr(SuiteConfig, key) else ""
        raise ConfigError(f"--{unread}: an evaluation on suites does not read it: leave it out{own}")


def _is_read(name: str) -> bool:
    return name in _READ or name.partition(".")[0] in _READ


def _without_training(config: Config, suites: list[dict[str, Any]]) -> Config:
    """Model, engines and verifiers of a run, with suites in the place of its task."""
    task = config.task
    return Config(
        **{name: getattr(config, name) for name in ("run", "model", "rollout", "generator", "verifier", "mesh")},
        task=TaskConfig(style=task.style, keep_special=task.keep_special, sandbox=task.sandbox),
        eval=replace(config.eval, suites=suites, grader=""),
        titan={name: table for name, table in config.titan.items() if name == "training"},
    )


def _with_budget(config: Config, budget: int) -> Config:
    """With one budget for thinking of all suites, some of which may have shorter answers. Errors: ConfigError."""
    if budget < 0:
        raise ConfigError(f"--thinking-budget {budget}: give a number of tokens, or 0 for no limit")
    suites = [{key: value for key, value in table.items() if key != "thinking_budget"} for table in config.eval.suites]
    return replace(config, eval=replace(config.eval, thinking_budget=budget, suites=suites))


def _suites(options: argparse.Namespace, tables: Sequence[dict[str, Any]], style: str | None) -> list[dict[str, Any]]:
    """Tables of the suites that are asked for: those of the TOML, with what the command line says over them."""
    known = {table.get("name"): table for table in tables}
    names = options.suite or list(known)
    given = {key: getattr(options, key) for key in OF_SUITES if getattr(options, key) is not None}
    styled = {} if style is None else {"style": style}
    return [styled | known.get(name, {"name": name}) | given for name in names]


def _style(config: Config) -> str:
    """``chat`` where the model has a chat template."""
    return "chat" if getattr(tokenizer_of(config), "chat_template", None) else "compact"


def _long_enough(config: Config) -> Config:
    """With room for the longest question and answer, as far as the model has positions. Errors: ConfigError."""
    tokenizer, needed = tokenizer_of(config), 0
    for suite in make_suites(config):
        asked = suite.with_prompts(config.eval.prompts)
        needed = max(needed, longest_prompt(asked, tokenizer) + asked.max_new_tokens(config.rollout.max_new_tokens))
    checked = resolve(config)
    room = min(max(needed, checked.titan.training.seq_len), num_positions(read_config(checked)))
    training = config.titan.get("training", {}) | {"seq_len": room}
    return replace(config, titan=config.titan | {"training": training})


def sampled_answers(checked: Checked) -> list[SuiteResult]:
    """Result of each suite, with every answer."""
    results: list[SuiteResult] = []
    asyncio.run(_evaluate(checked, results.append))
    return results


async def _evaluate(checked: Checked, record: Callable[[SuiteResult], None]) -> None:
    log = partial(say, file=sys.stderr)
    async with Actors(checked, checked.config.model.path, ALL_PARTS - {"trainer"}, log=log) as actors:
        await actors.evaluate_suites(record)


def _record(checked: Checked) -> dict[str, Any]:
    """What was evaluated, to do it again."""
    return {
        "model": checked.config.model.path,
        "seed": checked.config.run.seed,
        "generator": engine_settings(checked.config),
        "sources": find_sources(checked.config),
        "packages": package_versions(),
    }


def _folder(options: argparse.Namespace) -> Path:
    """Folder of the results, not made yet. Errors: ConfigError if it holds something, or cannot be made."""
    name = f"{Path(options.dir).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = options.out or Path("evaluations", name)
    check_place(folder, write=True)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give another --out")
    return folder


@contextmanager
def _reserved(folder: Path) -> Iterator[None]:
    """A context in which a folder is made, and no other evaluation's; gone behind it if nothing was written.

    Errors: ConfigError if it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(handle, fcntl.LOCK_EX) or any(folder.iterdir()):
            raise ConfigError(f"another evaluation writes into {folder}: give another --out")
        try:
            yield
        finally:
            with suppress(OSError):  # it holds something
                folder.rmdir()
    finally:
        os.close(handle)
