"""One stage: its process, its log, and the memory of the GPU meanwhile."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_check.supervision import SCRIPTS

from gpu_day.runs import Figures, figures_of_run
from gpu_day.stages import TREE, Stage
from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch

WATCH_SECONDS = 0.5
_MEMORY_OF_EACH = (
    *("nvidia-smi", "--query-compute-apps=timestamp,pid,used_memory", "--format=csv,noheader"),
    *("--loop-ms", str(int(1000 * WATCH_SECONDS))),
)
"""Which process has how much of the GPU, and when: to find what a plan left out."""


@contextmanager
def _memory_of_each(file: Path) -> Iterator[None]:
    with file.open("w") as output, subprocess.Popen(_MEMORY_OF_EACH, stdout=output, stderr=output) as watcher:
        try:
            yield
        finally:
            watcher.terminate()


def run(name: str, stage: Stage, out: Path) -> Figures:
    """Figures of a stage; ``failed_because``, why it has none or not all."""
    folder = out if name != "tests" else TREE
    paths = [str(SCRIPTS), str(TREE), str(out), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONUNBUFFERED": "1",
    }
    log, begun, failed = out / f"{name.replace(' ', '_')}.log", time.time(), ""
    with log.open("w") as output, gpu_watch(WATCH_SECONDS) as gpu_mib, _memory_of_each(log.with_suffix(".memory.csv")):
        command = ["timeout", "--kill-after=20", str(stage.deadline), *stage.command]
        code = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    seconds = time.time() - begun
    if code:
        failed = f"not done after {stage.deadline:g} s" if code in (124, 137) else f"exit code {code}"
    try:
        most = max(gpu_mib.values(), default=None)
        figures = figures_of_run(out / stage.run, begun, seconds, most) if stage.run else stage.read(log.read_text())
    except (OSError, LookupError, ValueError, StopIteration) as error:  # it came to nothing that could be read
        figures, failed = {}, failed or f"{type(error).__name__}: {error}"
    return figures | ({"failed_because": f"{failed}, see {log}"} if failed else {})
