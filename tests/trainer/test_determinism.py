"""Bits that repeat where they can, and nothing called bit-equal where they cannot: records of a GPU, without one."""

import asyncio
import json
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import made_run
import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_rl.config.load import load_config
from titan_rl.controller.preflight import device
from titan_rl.controller.preflight.device import TRAINER_DEVICE
from titan_rl.data.types import StepMetrics
from titan_rl.diagnostics.replay import replay
from titan_rl.diagnostics.replay.comparison import ComparedState, ComparedStep, compare_states, recorded_places
from titan_rl.records.run_directory.events import EventLog
from titan_rl.trainer.model.determinism import RankPlatform, is_equal, set_determinism, tolerance
from titan_rl.trainer.titan_config import build_titan

CPU, GPU = RankPlatform("cpu"), RankPlatform("NVIDIA H200")
FIXED = replace(GPU, deterministic=True)


def test_the_setting_is_honoured():
    assert build_titan(load_config(None, {"debug": {"deterministic": True}})).debug.deterministic
    assert not build_titan(load_config(None)).debug.deterministic


@pytest.fixture
def torch_as_it_was(monkeypatch):
    before = torch.backends.cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it goes with the test
    set_determinism(False, torch.device("cuda"))
    torch.backends.cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory = before


def test_a_gpus_process_is_told_and_a_cpus_is_left_alone(torch_as_it_was):
    set_determinism(True, torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_determinism(True, torch.device("cuda", 0))
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    set_determinism(False, torch.device("cuda", 0))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("places", "dtype", "wanted"),
    [
        ([CPU, CPU], "bfloat16", 0.0),
        ([], "float32", 0.0),
        ([FIXED, FIXED], "bfloat16", 0.0),
        ([GPU, GPU], "float32", 1e-3),
        ([GPU, FIXED], "bfloat16", 2e-2),
        ([FIXED, RankPlatform("NVIDIA A100", True)], "float32", 1e-3),
        ([FIXED, CPU], "float32", 1e-3),
    ],
)
def test_bits_repeat_in_one_order_of_additions_alone(places, dtype, wanted):
    assert tolerance(places, dtype) == wanted


def test_what_is_within_a_tolerance():
    nan = float("nan")
    assert is_equal(1.0, 1.0, 0.0) and not is_equal(1.0, 1.0 + 2**-50, 0.0)
    assert is_equal(1.0005, 1.0, 1e-3) and not is_equal(1.002, 1.0, 1e-3)
    assert is_equal(1e-8, 3e-8, 1e-3, of_order=1.0) and not is_equal(1e-8, 3e-8, 1e-3)
    assert is_equal(nan, nan, 0.0) and not is_equal(nan, 1.0, 1.0) and not is_equal(1.0, nan, 1.0)
    assert is_equal(None, None, 0.0) and not is_equal(None, 1.0, 1.0)
    assert ComparedStep(1, nan, nan, nan, nan).equal and not ComparedStep(1, 0.5, 0.5, 2.0, 2.01, 1e-3).equal


def test_a_gpu_is_asked_of_the_trainer(monkeypatch):
    """As the actor's ``examine`` answers, which unpickles what it is asked."""

    class Trainer:
        async def call(self, request):
            assert request.endpoint == "examine"
            [code] = request.arguments
            debug = SimpleNamespace(deterministic=True)
            learner = SimpleNamespace(device=torch.device("cuda", 1), titan=SimpleNamespace(debug=debug))
            return [(pickle.dumps(pickle.loads(code)(learner)), "")]

    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    told = []

    def note(kind: str, **fields) -> None:
        told.append((kind, fields))

    asyncio.run(device.record_trainer_device(Trainer(), load_config(None), note))
    assert told == [(TRAINER_DEVICE, {"device": "GPU 1", "deterministic": True, "torch": torch.__version__})]


def run_on(root, *places: RankPlatform):
    run_dir = made_run.made_run(root, checkpoint=0)
    events = EventLog(run_dir.root)
    for place in places:
        events.write(TRAINER_DEVICE, device=place.device, deterministic=place.deterministic, torch="2.13.0")
    events.close()
    return run_dir


def replayed(run_dir, monkeypatch, here: RankPlatform, off: float, *, as_json: bool = False) -> int:
    """As a replay on ``here``, whose losses come out ``off`` from what was recorded."""

    async def replay_steps(plan, tell, hear_of):
        hear_of(here)
        for step in range(plan.first, plan.last + 1):
            tell(step, StepMetrics(loss=0.25 + off, grad_norm=1.5 + off))

    monkeypatch.setattr(replay, "replay_steps", replay_steps)
    return replay.replay(run_dir.root, 1, made_run.STEPS, as_json=as_json)


@pytest.mark.parametrize(
    ("recorded", "here", "off", "code", "words"),
    [
        (CPU, CPU, 0.0, 0, "equal"),
        (CPU, CPU, 1e-9, 1, "DIFFERENT"),
        (GPU, GPU, 0.0, 0, "equal within 0.001"),
        (GPU, GPU, 1e-5, 0, "equal within 0.001"),
        (GPU, GPU, 1e-2, 1, "DIFFERENT"),
        (GPU, FIXED, 1e-5, 0, "equal within 0.001"),
        (FIXED, FIXED, 0.0, 0, "equal"),
        (FIXED, FIXED, 1e-9, 1, "DIFFERENT"),
        (FIXED, CPU, 1e-5, 0, "equal within 0.001"),
    ],
)
def test_replay_says_what_can_be_said(tmp_path, monkeypatch, capsys, recorded, here, off, code, words):
    run_dir = run_on(tmp_path / "run", recorded)
    assert replayed(run_dir, monkeypatch, here, off) == code
    said = capsys.readouterr().out
    verdicts = [line.partition("grad norm")[2].split(None, 3)[3] for line in said.splitlines() if line[:5] == "step "]
    assert verdicts == [words] * made_run.STEPS
    assert ("no order of additions" in said) == ("within" in words or off == 1e-2)


def test_equal_bits_on_a_gpu_are_not_claimed_without_its_setting(tmp_path, monkeypatch, capsys):
    for place, claimed in ((GPU, False), (FIXED, True)):
        run_dir = run_on(tmp_path / str(claimed), place)
        assert replayed(run_dir, monkeypatch, place, 0.0, as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["equal"] and told["bit_equal"] is claimed and bool(told["tolerance"]) is not claimed
        assert [one["device"] for one in told["recorded_on"]] == ["NVIDIA H200"]


def test_a_run_that_was_partly_on_a_gpu_is_no_cpus(tmp_path):
    """Nor is one whose records are odd of a kind that promises anything."""
    run_dir = run_on(tmp_path / "run", CPU, GPU)
    assert tolerance([*recorded_places(run_dir.root), CPU], "float32") == 1e-3
    with open(run_dir.root / "events.jsonl", "a") as file:
        file.write('[1]\n{"kind": "trainer_device", "deterministic": "yes"}\n')
    assert recorded_places(run_dir.root)[-1] == RankPlatform("None")


def states(tmp_path, change: float):
    """Two checkpoints; in the second all values of one weight are ``change`` larger, relatively."""
    state = {"model": {"a": torch.arange(1.0, 9.0), "b": torch.ones(3)}}
    state |= {"optimizer": {"state.a.exp_avg": torch.full((8,), 1e-4), "state.a.exp_avg_sq": torch.full((8,), 1e-9)}}
    other = {"model": state["model"] | {"a": state["model"]["a"] * (1 + change)}, "optimizer": state["optimizer"]}
    for name, one in (("ours", state), ("theirs", other)):
        dcp.save(one, checkpoint_id=tmp_path / name)
    return compare_states(tmp_path / "ours", tmp_path / "theirs")


def test_states_are_compared_bit_for_bit_and_within(tmp_path):
    same = states(tmp_path / "same", 0.0)
    assert same.is_equal(0.0) and same.line(0.0).endswith("equal, bit for bit")
    assert "bit for bit" not in same.line(1e-3) and "equal within 0.001" in same.line(1e-3)
    near = states(tmp_path / "near", 1e-5)
    assert near.num_different == 1 and near.relative_difference == pytest.approx(1e-5, rel=0.1)
    assert not near.is_equal(0.0) and near.is_equal(1e-3) and "differ, the first model.a" in near.line(0.0)
    assert not states(tmp_path / "far", 0.1).is_equal(1e-3)


def test_a_missing_tensor_is_within_no_tolerance(tmp_path):
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "ours")
    dcp.save({"model": {"a": torch.ones(3), "b": torch.ones(3)}}, checkpoint_id=tmp_path / "theirs")
    found = compare_states(tmp_path / "ours", tmp_path / "theirs")
    assert found.first_different == "model.b" and not found.is_equal(1.0)
    assert not ComparedState("", 3, 1, "a", float("nan"), float("inf")).is_equal(1.0)
