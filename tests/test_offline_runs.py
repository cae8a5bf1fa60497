"""Runs without a generator, through the real trainer actors: only they start, and a kill changes no number."""

import os
import signal
import time

import pytest
from running import gone, output, start, train

from titan_rl.records.events import read_events
from titan_rl.records.metrics import read_metrics
from titan_rl.records.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.confirms]
SETTINGS = {
    "algorithm__name": "kto",
    "data__file": "task",
    "data__made_rows": 60,
    "data__examples_per_step": 8,
    "sft__steps": 2,
    "sft__examples_per_step": 8,
    "training__steps": 12,
    "checkpoint__every": 4,
    "eval__prompts": 8,
}


def numbers(root) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in read_metrics(root) if "loss" in r}


def wait_for_step(process, root, step: int) -> None:
    deadline = time.monotonic() + 120
    while step not in numbers(root):
        assert process.poll() is None and time.monotonic() < deadline, output(root)[-2000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert train(root, **SETTINGS) == 0, output(root)[-3000:]
    return root


def test_only_trainers_start_and_a_run_directory_is_whole(undisturbed):
    run = RunDir(undisturbed)
    started = {event["name"].split()[0] for event in read_events(undisturbed) if event["kind"] == "started"}
    assert started == {"trainer"}
    assert sorted(numbers(undisturbed)) == list(range(1, 13))
    assert run.summary.exists() and (run.model / "model.safetensors").exists() and run.curves.exists()
    assert "held-out loss after: " in run.log.read_text()


def test_a_killed_controller_goes_on_with_the_same_numbers(undisturbed, tmp_path):
    root = tmp_path / "killed"
    process = start(root, **SETTINGS)
    wait_for_step(process, root, 6)
    process.kill()
    process.wait()
    assert gone({process.pid})
    assert train(root, "--resume", **SETTINGS) == 0, output(root)[-3000:]
    assert numbers(root) == numbers(undisturbed)


def test_a_killed_rank_goes_on_with_the_same_numbers(undisturbed, tmp_path):
    root = tmp_path / "rank"
    process = start(root, **SETTINGS)
    wait_for_step(process, root, 5)
    [pid] = [e["pid"] for e in read_events(root) if e["kind"] == "started" and e["name"] == "trainer rank 0"]
    os.kill(pid, signal.SIGKILL)
    assert process.wait(180) == 0, output(root)[-3000:]
    assert [event["kind"] for event in read_events(root)].count("trainer_repaired") == 1
    assert numbers(root) == numbers(undisturbed)
