"""Where a run's numbers go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

What is given to the latter two leaves this machine, so both are off unless the TOML asks for them. Trackio is not
installed with titan_rl. No tracker can stop a run.
"""

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import MetricsConfig


class Tracker(Protocol):
    def log(self, record: dict[str, float]) -> None:
        """Numbers by name, ``step`` among them. A step can come again."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """An event for each step, written at once: the thread of SummaryWriter prints a traceback when the disk is full."""

    def __init__(self, project: str, root: Path, config: dict[str, Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = root / "tensorboard"
        folder.mkdir(exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(folder / name, "xb"))  # noqa: SIM115 - open until close()
        self._write(file_version="brain.Event:2", wall_time=now)

    def log(self, record: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - protobuf makes it at import

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.items() if name != "step"]
        self._write(step=record["step"], wall_time=time.time(), summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - protobuf makes it at import

        self._records.write(Event(**fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class WandB:
    def __init__(self, project: str, root: Path, config: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")

        # the directory's name is the run's id, too: a resumed run goes on in the same curves
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(
            project=project, name=root.name, id=root.name, resume="allow", dir=root, config=config, settings=settings
        )
        self._run.define_metric("*", step_metric="step")  # its own count of steps cannot go back

    def log(self, record: dict[str, float]) -> None:
        self._run.log(record)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, project: str, root: Path, config: dict[str, Any]) -> None:
        self._module = importlib.import_module("trackio")
        self._module.init(project=project, name=root.name, config=config, resume="allow")

    def log(self, record: dict[str, float]) -> None:
        self._module.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self._module.finish()


def check_trackers(settings: MetricsConfig) -> None:
    """Check of the configured trackers.

    Errors: ConfigError for one that is not installed, or that would ask for a login in the middle of a run.
    """
    for name in ("wandb", "trackio"):
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(f"metrics.{name} = true needs a package: pip install {name}, or leave it out")
    if settings.wandb and os.environ.get("WANDB_MODE", "online") == "online":
        wandb = importlib.import_module("wandb")

        if not wandb.login(prompt=False, verify=False):
            raise ConfigError("metrics.wandb = true needs a login: wandb login, or set WANDB_MODE=offline")


_KINDS: dict[str, Callable[[str, Path, dict[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}
"""By their key in [metrics]; made of a project, the run's directory and its resolved configuration."""


class Trackers:
    """Owner of the configured trackers. What goes wrong with one is said, once, and the run goes on without it."""

    def __init__(self, settings: MetricsConfig, root: Path, config: dict[str, Any], log: Callable[[str], None]) -> None:
        """``config``: the resolved one."""
        self._log = log
        self._open: dict[str, Tracker] = {}
        for name, kind in _KINDS.items():
            if getattr(settings, name):
                with self._spared(name):
                    self._open[name] = kind(settings.project, root, config)

    def log(self, record: dict[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            with self._spared(name):
                tracker.log(record)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._spared(name):
                tracker.close()

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a library that talks to a server: whatever it raises
            self._open.pop(name, None)
            line = next(iter(str(error).strip().splitlines()), "")
            self._log(f"metrics.{name}: {type(error).__name__}: {line}; the run goes on without it")
