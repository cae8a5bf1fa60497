"""How many generators a run should have from now on: a request in its directory, which the run looks at.

Anyone who may write there may ask: ``titan-rl scale RUN --generators N``, or ``scale_generators`` from Python.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.data.files import replace_text
from titan_rl.mesh.generators import Generators
from titan_rl.records.rundir import RunDir

_LOOK_SECONDS = 0.5


def scale_generators(run: str | Path, count: int) -> None:
    """Ask a run that is under way for so many replicas. Errors: ConfigError if there is no such run."""
    run_dir = RunDir(Path(run))
    if count < 1:
        raise ConfigError(f"--generators {count}: a run needs at least one")
    if not run_dir.is_in_use():
        raise ConfigError(f"no run is under way in {run}: give the directory of one that is")
    replace_text(run_dir.scale_request, f"{count}\n")


def take_scale_request(run_dir: RunDir) -> int | None:
    """How many generators were asked for since the last call, if any were."""
    with suppress(OSError, ValueError):
        count = int(run_dir.scale_request.read_text())
        run_dir.scale_request.unlink()
        return count
    return None


async def grant_scale_requests(run_dir: RunDir, generators: Generators, say: Callable[[str], None]) -> None:
    """For as long as the run lasts."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if (count := take_scale_request(run_dir)) is not None:
            say(f"{count} generators are wanted, {len(generators.router.members)} there are")
            generators.scale(count)
