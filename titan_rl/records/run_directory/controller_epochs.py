"""Which controller of a run is the latest, by the number of times that it was begun or resumed.

Hosts of other machines (mesh/launch/claims.py) take orders from the latest alone. So one that was cut off, and
whose run has gone on elsewhere from the same directory or a copy of it, has nothing to say when it comes back.
"""

import json
import re
import uuid
from pathlib import Path

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError
from titan_rl.data.storage.files import replace_text


def next_epoch(file: Path) -> tuple[str, int]:
    """The run's own name, and an epoch that it has not had; it is on record from now on. Errors: ConfigError."""
    run, epoch = _read(file) if file.exists() else (uuid.uuid4().hex, -1)
    replace_text(file, json.dumps({"run": run, "epoch": epoch + 1}) + "\n")
    return run, epoch + 1


def _read(file: Path) -> tuple[str, int]:
    try:
        record = read_json(file)
        run, epoch = record["run"], record["epoch"]
        if re.fullmatch("[0-9a-f]{32}", run) and type(epoch) is int and epoch >= 0:
            return run, epoch
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        pass
    raise ConfigError(f"{file} is damaged: put it back; or remove it, if no other controller of this run is left")
