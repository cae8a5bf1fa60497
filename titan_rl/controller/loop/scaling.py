"""How many generators a run should have from now on: a request in its directory, which the run looks at.

Anyone who may write there may ask: ``titan-rl scale RUN --generators N``, or ``scale_generators`` from Python.
"""

import asyncio
import re
from pathlib import Path

from titan_rl.config.io.bounded_files import RefusedFile, open_file
from titan_rl.config.load import ConfigError
from titan_rl.data.callbacks import Log
from titan_rl.data.storage.files import replace_text
from titan_rl.mesh.control.generators import Generators
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir, is_on_data

_LOOK_SECONDS = 0.5
_MAX_BYTES = 100


def scale_generators(run: str | Path, count: int) -> None:
    """Ask a run that is under way for so many replicas. Errors: ConfigError if there is no such run."""
    if count < 1:
        raise ConfigError(f"--generators {count}: a run needs at least one")
    run_dir = existing_run_dir(Path(run), write=True)
    if not run_dir.is_in_use():
        raise ConfigError(f"no run is under way in {run}: give the directory of one that is")
    if is_on_data(run_dir):
        raise ConfigError(f"{run} is a run on data.file, which has no generators")
    replace_text(run_dir.scale_request, f"{count}\n")


def take_scale_request(run_dir: RunDir) -> int | None:
    """How many generators were asked for since the last call, if any were. Errors: ConfigError if it is no number of
    them; it is not asked again."""
    try:
        with open_file(run_dir.scale_request) as file:
            text = file.read(_MAX_BYTES)
        run_dir.scale_request.unlink()
    except OSError:
        return None
    except RefusedFile:
        run_dir.scale_request.unlink()
        raise
    if not re.fullmatch(rb"[1-9][0-9]{0,3}\s*", text):
        raise ConfigError(f"{run_dir.scale_request} asked for {text[:20]!r} generators: give a number from 1 to 9999")
    return int(text)


async def grant_scale_requests(run_dir: RunDir, generators: Generators, log: Log) -> None:
    """Apply scale requests as long as the run lasts."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            count = take_scale_request(run_dir)
        except ConfigError as error:
            log(str(error))
            continue
        if count is not None:
            log(f"scale: requested {count} generators, running {generators.num_replicas}")
            generators.scale(count)
