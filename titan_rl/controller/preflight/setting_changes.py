"""Record of settings changed during a run (interactive/change_settings.py), applied again on resume."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.io.overrides import overriding
from titan_rl.config.load import ConfigError, flat, with_overrides, written
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import Config
from titan_rl.controller.preflight.live_settings import effects_of
from titan_rl.data.storage.files import replace_text
from titan_rl.records.run_directory.rundir import RunDir


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    """None: it was not set."""
    after: Any
    step: int
    """The last that was trained under the one before."""
    who: str

    def __str__(self) -> str:
        return f"{self.key} = {self.after}, as {self.who} set it after step {self.step}"


def record_changes(run_dir: RunDir, changes: list[Change]) -> None:
    records = [asdict(each) for each in (*read_changes(run_dir), *changes)]
    replace_text(run_dir.changes, json.dumps(records, indent=2) + "\n")


def read_changes(run_dir: RunDir) -> list[Change]:
    """In their order. Errors: ConfigError for a record that is damaged."""
    try:
        return [Change(**record) for record in (read_json(run_dir.changes) if run_dir.changes.exists() else [])]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{run_dir.changes} is damaged ({type(error).__name__}): put it back, or remove it") from None


def with_changes(config: Config, run_dir: RunDir) -> tuple[Config, list[Change]]:
    """What a run that is resumed under ``config`` goes on with: as it was set last, wherever ``config`` still says what
    was so before; and the changes that hold. A record names no code: a reward must be given again.

    Errors: ConfigError."""
    settings, latest = flat(written(config)), _first_and_last(read_changes(run_dir))
    held = [
        last for first, last in latest if settings.get(last.key) == first.before and not is_reference(str(last.after))
    ]
    for each in held:
        effects_of(each.key, on_data=bool(config.data.file))  # a record is no way to set anything else
        config = with_overrides(config, overriding({each.key: each.after}))
    return config, held


def _first_and_last(changes: list[Change]) -> Iterator[tuple[Change, Change]]:
    """Of each setting."""
    for key in dict.fromkeys(each.key for each in changes):
        of_key = [each for each in changes if each.key == key]
        yield of_key[0], of_key[-1]
