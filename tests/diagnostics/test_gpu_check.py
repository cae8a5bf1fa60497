"""scripts/gpu_check.py without a GPU: what it says, whom it kills, and that all of it goes through."""

import json
import os
import subprocess
import sys
import time

import pytest
from gpu_check.report import exit_code, outcome, verdict
from gpu_check.supervision import Supervisor
from gpu_check.thresholds import NOT_MEASURED, ROWS, Bar
from tree import SCRIPTS, SUPPORT

FEW = ["kernel discounted_scan", "train 135m float32"]


def run(*arguments: str, timeout: float) -> tuple[int, list[dict], str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_few_rows_rehearse():
    code, lines, said = run("--rehearse", "--rows", *FEW, timeout=150)
    assert code == 0, said[-3000:]
    assert [line.get("row") for line in lines] == [*FEW, None]
    assert all(line["holds"] for line in lines[:-1])
    assert lines[-1]["verdict"] == "rehearsed, nothing is measured" and lines[-1]["device"] == "cpu"


@pytest.mark.confirms
def test_all_rows_rehearse():
    begun = time.monotonic()
    code, lines, said = run("--rehearse", timeout=400)
    assert code == 0, f"{lines}\n{said[-3000:]}"
    assert [line["row"] for line in lines[:-1]] == list(ROWS)
    needing_a_gpu = {f"{row}: {bar}" for row in ROWS for bar in ROWS[row].bars if bar.on_gpu}
    assert needing_a_gpu <= set(lines[-1]["not_measured"])
    assert time.monotonic() - begun < 240, "it is meant to take a minute, on a loaded machine two"


def test_without_a_gpu_it_says_how_to_rehearse():
    code, lines, said = run("--rows", FEW[0], timeout=100)
    assert code == 2 and not lines and "--rehearse" in said


# what is said


@pytest.mark.parametrize(
    ("figures", "on_gpu", "met"),
    [
        ({"x": 0.5}, True, True),
        ({"x": 1.5}, True, False),
        ({"x": float("nan")}, True, False),
        ({"x": 1.5}, False, None),
        ({}, True, None),
    ],
)
def test_a_bar(figures, on_gpu, met):
    told = Bar("x", 1.0).judge(figures, on_gpu)
    assert told["met"] is met and (met is not None) == (told["value"] != NOT_MEASURED)


def test_what_is_not_measured_holds_in_a_rehearsal_alone():
    answer = {"figures": {"loss_is_finite": True, "share_of_matrix_rate": 0.5}}
    bare = {"figures": {"loss_is_finite": True}}
    row = "train 1b bfloat16"
    assert outcome(row, answer, 1.0, True)["holds"] and outcome(row, bare, 1.0, False)["holds"]
    assert not outcome(row, bare, 1.0, True)["holds"]
    assert not outcome(row, {"failed": "out of memory"}, 1.0, False)["holds"]
    assert not outcome(row, {"figures": {"loss_is_finite": False}}, 1.0, False)["holds"]


def test_one_row_that_falls_is_named_and_gives_exit_code_1():
    good = outcome("snapshots", {"figures": {"share_of_step": 0.01}}, 2.0, True)
    bad = outcome("snapshots", {"figures": {"share_of_step": 0.2, "odd": float("inf")}}, 2.0, True)
    assert exit_code(verdict([good], True, {})) == 0 and verdict([good], True, {})["verdict"] == "holds"
    last = verdict([good, bad], True, {"device": "one"})
    assert exit_code(last) == 1 and last["fallen"] == ["snapshots"] and last["device"] == "one"
    json.dumps([good, bad, last], allow_nan=False)
    assert exit_code(verdict([], True, {})) == 1


# who is killed


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT / "fakes"))
    supervisor = Supervisor(rehearse=True, folder=tmp_path, module="fake_gpu_worker")
    yield supervisor
    supervisor.close()


def test_one_process_does_all_rows_that_go_well(supervisor):
    pids = {supervisor.ask("well", 30, alone=False)["figures"]["pid"] for _ in range(3)}
    assert len(pids) == 1


@pytest.mark.parametrize(("row", "why"), [("hangs", "after 1 s"), ("dies", "with 7"), ("raises", "as it was told")])
def test_after_a_row_that_fails_the_next_has_another_process(supervisor, row, why):
    before = supervisor.ask("well", 30, alone=False)["figures"]["pid"]
    assert why in supervisor.ask(row, 1 if row == "hangs" else 30, alone=False)["failed"]
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert supervisor.ask("well", 30, alone=False)["figures"]["pid"] != before


def test_a_row_that_must_be_alone_is(supervisor):
    pids = [supervisor.ask("well", 30, alone=alone)["figures"]["pid"] for alone in (False, True, False)]
    assert len(set(pids)) == 3


# what it is made of


def test_every_row_has_its_check():
    import gpu_check.checks

    assert set(gpu_check.checks.CHECKS) == set(ROWS)


def test_operations_are_counted_as_the_model_has_them(tmp_path):
    import torch
    from batches import batch_of
    from gpu_check.sizes import SIZES, operations, seen
    from transformers import LlamaConfig, LlamaForCausalLM

    assert seen(3, 2) == sum(2 + query + 1 for query in range(3))
    size = SIZES["tiny"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**size.as_config()))
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and "norm" not in name)
    assert weights == size.layer_weights
    rows = batch_of(0, row_tokens=1000).rows[0]
    tokens, trained = sum(len(row.tokens_T) for row in rows), sum(len(row.target_S) for row in rows)
    least = 6 * (weights * tokens + size.hidden * size.words * trained)
    assert least < operations(size, rows) < 1.1 * least


def test_an_older_torch_is_enough():
    """As far as its two names go; the machine itself is not at hand."""
    code = """
import torch.distributed.fsdp as fsdp
fsdp.__dict__.pop("DataParallelMeshDims")
from gpu_check.stubs import prepare
prepare(rehearse=True)
import gpu_check.fixtures
import sys
assert sys.modules["vllm"] is None and "torchtitan.components.dataloader" not in sys.modules
try:
    fsdp.fully_shard(None, dp_mesh_dims=1)
except NotImplementedError:
    print("refused")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["refused"], done.stderr[-3000:]
