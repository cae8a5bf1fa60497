"""How many generators a run should have from now on: a wish in its directory, which the run looks at.

Whoever may write there may ask: ``titan-rl scale RUN --generators N``, or ``scale_generators`` from Python.
"""

from contextlib import suppress
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.records.rundir import RunDir


def scale_generators(run: str | Path, count: int) -> None:
    """Ask a run that is under way for so many replicas. Errors: ConfigError if there is no such run."""
    run_dir = RunDir(Path(run))
    if count < 1:
        raise ConfigError(f"--generators {count}: a run needs at least one")
    if not run_dir.is_in_use():
        raise ConfigError(f"no run is under way in {run}: give the directory of one that is")
    beside = run_dir.wish.with_suffix(".new")
    beside.write_text(f"{count}\n")
    beside.replace(run_dir.wish)


def take_wish(run_dir: RunDir) -> int | None:
    """How many generators somebody asked for since the last call, if anybody did."""
    with suppress(OSError, ValueError):
        count = int(run_dir.wish.read_text())
        run_dir.wish.unlink()
        return count
    return None
