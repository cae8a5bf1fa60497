"""A run's controller as lines of shell, for what starts it again after its machine was lost."""

import shlex
from collections.abc import Sequence

_LOCK_SECONDS = 120
"""A file system gives the lock of a machine without power free after a while."""


def resumable(program: str, config: str, overrides: Sequence[str], run_dir: str) -> list[str]:
    """``program``: shell that runs ``titan-rl``; ``overrides`` name ``run_dir``, too. The first start begins the run
    there, any other goes on with it. The shell becomes the controller, so signals reach that."""
    home = shlex.quote(run_dir)
    arguments = shlex.join((config, *overrides))
    return [
        f"[ ! -e {home}/lock ] || flock --wait {_LOCK_SECONDS} {home}/lock true",
        f"resume=; [ ! -e {home}/config.json ] || resume=--resume",
        f"exec {program} train {arguments} $resume",
    ]
