"""The configuration that a run directory records, for whoever looks at the run later.

A record may be somebody else's, and it may name code: a reward, an algorithm, a launcher. It is imported from folders
that the user's own command gives, never from those that the record gives, and never from the run directory.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, load_resolved
from titan_rl.config.mixture import all_tasks
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import TASKS_OF_OTHERS, Config
from titan_rl.controller.preflight.resume import first_change, read_settings
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.step_names import step_of


def load_recorded(run_dir: RunDir, path: Path, folders: Sequence[str]) -> Config:
    """The configuration in ``path``, with ``folders`` in place of the ones that it records.

    Errors: ConfigError; also if it names code and there are no ``folders``, or that code is in the run directory."""
    config = load_resolved(path)
    config.eval.suites.clear()  # their tasks may name code, and whoever reads a record evaluates none
    for setting, name in _references(config).items():
        if not folders:
            raise ConfigError(
                f"{path} names code, {setting} = {name!r}, which is imported only from a folder that you give: look at "
                f"it, then give --run.plugin_path FOLDER"
            )
        _check_outside(run_dir, setting, name, folders)
    for setting, task in all_tasks(config.task).items():
        if run_dir.root.resolve() in Path(python := str(task.options.get("python", ""))).resolve().parents:
            raise ConfigError(f"{setting}.options.python = {python!r} is in {run_dir.root}, whose programs are not run")
    config.task.sandbox.pop("token_env", None)  # no secret of the user's is for a server that a record names
    # without any code, it is only where data files are looked for
    config.run.plugin_path = [str(Path(folder).absolute()) for folder in folders or ["."]]
    return config


def _references(config: Config) -> dict[str, str]:
    """Settings that name what is outside the tree."""
    names = {
        **{f"{setting}.name": task.name for setting, task in all_tasks(config.task).items()},
        **{f"{setting}.reward": task.reward for setting, task in all_tasks(config.task).items()},
        **{
            f"{setting}.rewards.{name}": name
            for setting, task in all_tasks(config.task).items()
            for name in task.rewards
        },
        **{
            f"{setting}.rewards_by_source.{source}": name
            for setting, task in all_tasks(config.task).items()
            for source, name in task.rewards_by_source.items()
        },
        "algorithm.name": config.algorithm.name,
        "model.family": config.model.family,
        "mesh.launcher": config.mesh.launcher,
        "hosts.launcher": config.hosts.launcher,
    }
    for setting, task in all_tasks(config.task).items():
        if task.name in TASKS_OF_OTHERS:  # how answers become actions, and observations text
            hooks = {key: task.options.get(key) for key in ("id", "action", "observation")}
            names |= {f"{setting}.options.{key}": name for key, name in hooks.items() if isinstance(name, str)}
            names |= {f"{setting}.options.{key}": name for key, name in _plugins(task.options.get("env"))}
    return {setting: name for setting, name in names.items() if is_reference(name)}


def _plugins(table: Any, key: str = "env") -> Iterator[tuple[str, str]]:
    """Modules that a table of verifiers names by an ``id``, as references."""
    for name, value in table.items() if isinstance(table, dict) else ():
        if name == "id" and isinstance(value, str):
            yield f"{key}.id", f"{value.rpartition('/')[2].partition('@')[0].replace('-', '_').lower()}:{value}"
        yield from _plugins(value, f"{key}.{name}")


def _check_outside(run_dir: RunDir, setting: str, name: str, folders: Sequence[str]) -> None:
    """Errors: ConfigError if Python would find the module in the run directory, also as a package's part: from the
    folder above a run directory ``x``, ``x.module`` is one."""
    home, package = run_dir.root.resolve(), name.partition(":")[0].partition(".")[0]
    for folder in (*folders, *sys.path):
        for place in (Path(folder), Path(folder, package), Path(folder, f"{package}.py")):
            resolved = place.resolve()
            is_above = place != Path(folder) and resolved in home.parents
            if resolved == home or home in resolved.parents or is_above:
                raise ConfigError(
                    f"{setting} = {name!r} leads into {run_dir.root}, whose code is not run: give --run.plugin_path "
                    f"with a folder outside of it"
                )


def one_configuration(run_dir: RunDir, first: int, last: int) -> Path:
    """Path of the configuration of steps ``first`` to ``last``. Errors: ConfigError if settings changed between
    them."""
    paths = list(dict.fromkeys(run_dir.config_of(step) for step in range(first, last + 1)))
    if len(paths) > 1:
        earlier, later = (read_settings(path) for path in paths[:2])
        key, until = first_change(earlier, later), step_of(paths[0].stem)
        assert until is not None, "config_of names earlier configurations by their last step"
        raise ConfigError(
            f"{run_dir.root} was resumed with other settings after step {until}: {key} was {earlier.get(key)}, then "
            f"{later.get(key)}; replay its parts, with --to {until} or --from {until + 1}"
        )
    return paths[0]
