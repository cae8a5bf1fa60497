"""Entry points from Python: ``titan_rl.launch`` starts a run, ``titan_rl.connect`` views another process's run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.command_line import TrainCommand
from titan_rl.config.io.overrides import overriding
from titan_rl.config.load import ConfigError, load_config, nearest_setting
from titan_rl.config.shipped import find_config
from titan_rl.controller.interactive.live import LiveSession
from titan_rl.controller.interactive.run_view import RunView
from titan_rl.records.run_directory.rundir import existing_run_dir


def launch(
    config_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    **sections: Mapping[str, Any],
) -> LiveSession:
    """A run of a TOML (a path, or the name of a shipped one), which starts as it is awaited:

        session = await titan_rl.launch("quickstart", {"training.steps": 50}, run={"seed": 2})
        await session.step(3)

    ``overrides``: by dotted names; ``sections``: by section. ``resume``: go on with the newest run of that file.
    Errors: ConfigError, with nothing started and nothing made.
    """
    from titan_rl.controller.session import Session  # the imports of torch and Monarch, which looking on does without

    tables = overriding(overrides or {}, sections, nearest_setting)
    path = find_config(config_file) if config_file is not None else None
    # by the name that was given, which `titan-rl train` finds, too, wherever it is run
    name = str(config_file) if config_file is not None else None
    return LiveSession(Session.open(load_config(path, tables), TrainCommand(name, tables), resume=resume))


def connect(run_dir: str | Path) -> RunView:
    """A run that another process drives, or that has ended. Errors: ConfigError if there is none."""
    directory = existing_run_dir(Path(run_dir))
    if not directory.config.is_file():
        raise ConfigError(
            f"{directory.root} holds no config.json: give a run directory, such as runs/quickstart-<date>"
        )
    return RunView(directory)
