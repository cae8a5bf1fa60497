"""How many generators a run should have from now on: a scale request, a file in its directory that the run reads.

Anyone who may write there may ask: ``titan-rl scale RUN --generators N``, or ``scale_generators`` from Python.
"""

from contextlib import suppress
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.data.files import replace_text
from titan_rl.records.rundir import RunDir


def scale_generators(run: str | Path, count: int) -> None:
    """Ask a running run for ``count`` replicas. Errors: ConfigError if no run is active in that directory."""
    run_dir = RunDir(Path(run))
    if count < 1:
        raise ConfigError(f"--generators {count}: a run needs at least one")
    if not run_dir.is_in_use():
        raise ConfigError(f"no run is active in {run}: give the directory of one that is")
    replace_text(run_dir.scale_request, f"{count}\n")


def take_scale_request(run_dir: RunDir) -> int | None:
    """How many generators were asked for since the last call; None if nobody asked."""
    with suppress(OSError, ValueError):
        count = int(run_dir.scale_request.read_text())
        run_dir.scale_request.unlink()
        return count
    return None
