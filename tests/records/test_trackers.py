"""Trackers beside metrics.jsonl: what they are told, and that none can stop a run or ask for anything in the middle."""

import importlib.util
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import MetricsConfig
from titan_rl.records.metrics import MetricsLog, read_metrics
from titan_rl.records.run_directory.rundir import existing_run_dir
from titan_rl.records.trackers import Trackers, check_trackers

CONFIG = {"run": {"seed": 1}}


class Told:
    """Stands for either package: what it was told, in order."""

    def __init__(self, failing: str = ""):
        self.calls: list[tuple] = []
        self.failing = failing
        self.Settings, self.is_logged_in = dict, False

    def _hear(self, name: str, *what) -> None:
        if name == self.failing:
            raise ConnectionError("no route\nto the server")
        self.calls.append((name, *what))

    def init(self, **settings):
        self._hear("init", settings["project"], settings["name"], settings["config"])
        return self

    def login(self, prompt, verify) -> bool:
        assert not prompt and not verify
        return self.is_logged_in

    def define_metric(self, name, step_metric):
        self._hear("define_metric", name, step_metric)

    def log(self, record, step=None):
        self._hear("log", record, step)

    def finish(self):
        self._hear("finish")


@pytest.fixture
def install(monkeypatch):
    def install(name: str, failing: str = "") -> Told:
        told = Told(failing)
        monkeypatch.setitem(sys.modules, name, told)
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: told if wanted == name else find(wanted))
        return told

    return install


def write_two(root, settings: MetricsConfig) -> list[str]:
    """A step, and the same again after a way back; what was said."""
    root.mkdir()
    said: list[str] = []
    log = MetricsLog(root, Trackers(settings, root, CONFIG, said.append))
    for loss in (2.0, 1.0):
        log.write({"step": 3, "loss": loss})
    log.close()
    assert list(read_metrics(root)) == [{"step": 3, "loss": 1.0}]
    return said


def test_weights_and_biases_is_told_by_the_runs_own_steps(install, tmp_path):
    told = install("wandb")
    assert write_two(tmp_path / "run", MetricsConfig(tensorboard=False, wandb=True, project="counts")) == []
    records = [("log", {"step": 3, "loss": loss}, None) for loss in (2.0, 1.0)]
    begun = [("init", "counts", "run", CONFIG), ("define_metric", "*", "step")]
    assert told.calls == [*begun, *records, ("finish",)]


def test_what_weights_and_biases_leaves_in_a_run_directory_keeps_nobody_from_reading_it(tmp_path, monkeypatch):
    """The package itself, offline, and again as the run goes on."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    root, said = tmp_path / "run", []
    root.mkdir()
    for step in (1, 2):
        log = MetricsLog(root, Trackers(MetricsConfig(tensorboard=False, wandb=True), root, CONFIG, said.append))
        log.write({"step": step, "loss": 1.0})
        log.close()
        assert said == [] and list((root / "wandb").glob("offline-run-*/*.wandb"))
        existing_run_dir(root, write=True)
    leaving = [path for path in root.rglob("*") if path.is_symlink() and root not in path.resolve().parents]
    assert {path.name for path in leaving} == {"debug-core.log"}, "else the test has nothing to show"


def test_trackio_is_told_the_same(install, tmp_path):
    told = install("trackio")
    assert write_two(tmp_path / "run", MetricsConfig(tensorboard=False, trackio=True)) == []
    records = [("log", {"loss": loss}, 3) for loss in (2.0, 1.0)]
    assert told.calls == [("init", "titan_rl", "run", CONFIG), *records, ("finish",)]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_one_that_fails_is_left_out_with_one_line(install, tmp_path, failing):
    told = install("wandb", failing)
    said = write_two(tmp_path / "run", MetricsConfig(tensorboard=False, wandb=True))
    assert said == ["metrics.wandb: ConnectionError: no route; the run goes on without it"]
    assert [name for name, *_ in told.calls].count("log") == (2 if failing == "finish" else 0)


def test_what_is_missing_is_told_before_anything_starts(install, monkeypatch):
    check_trackers(MetricsConfig())
    with pytest.raises(ConfigError, match="pip install trackio, or leave it out"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        check_trackers(MetricsConfig(trackio=True))
    monkeypatch.undo()
    told = install("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="wandb login, or set WANDB_MODE=offline"):
        check_trackers(MetricsConfig(wandb=True))
    told.is_logged_in = True
    check_trackers(MetricsConfig(wandb=True))
    told.is_logged_in = False
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(MetricsConfig(wandb=True))


def test_tensorboard_is_on_unless_it_is_not_wanted_and_reads_what_was_measured(tmp_path):
    write_two(tmp_path / "with", MetricsConfig())
    write_two(tmp_path / "without", MetricsConfig(tensorboard=False))
    assert not (tmp_path / "without" / "tensorboard").exists()
    accumulator = EventAccumulator(str(tmp_path / "with" / "tensorboard"), purge_orphaned_data=False).Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(3, 2.0), (3, 1.0)]
