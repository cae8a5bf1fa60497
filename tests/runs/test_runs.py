"""Runs in other modes, and runs that are stopped or hurt: what they say, what they save, what they leave behind."""

import json
import os
import signal
import time

import pytest
import running
import torch
from gpu_day.runs import figures_of_run
from safetensors.torch import load_file

from titan_rl import cli
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import agreement_limit, read_metrics
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = pytest.mark.slow


def test_asynchronous_two_of_everything_over_rdma(tmp_path):
    """Staleness stays in its bound, two engines and two verifiers share the work, two ranks publish over RDMA."""
    root = tmp_path / "run"
    code = running.train(
        root,
        training__steps=6,
        rollout__max_staleness=1,
        generator__replicas=2,
        verifier__procs=2,
        parallelism__data_parallel_shard_degree=2,
        mesh__transport="rdma_tcp",
        algorithm__updates_per_batch=2,
    )
    assert code == 0, running.output(root)[-3000:]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert max(record["staleness_max"] for record in records) == 1
    assert all(record["agreement_mean"] <= 1.5 for record in records)
    assert "weights by rdma_tcp" in running.output(root)
    account = Ledger(root / "ledger.db").account()
    assert account["trained"] == 96 and account["issued"] == 96 + account["pending"]


def test_stop_saves_and_resume_goes_on(tmp_path):
    """With images, which generator and trainer see alike, and which replay finds on record; of adapters alone."""
    root, vision = tmp_path / "run", dict(model__path="tiny-vision", task__name="shapes")
    vision |= dict(lora__rank=4, lora__sync="adapter", optimizer__lr=1e-2, model__images__max_pixels=24 * 24)
    process = running.start(root, **vision, training__steps=5000)
    running.wait_for_step(root, 3)
    children = running.descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole process group
    assert process.wait(30) == 130, running.output(root)[-3000:]
    assert running.gone(children)
    summary = json.loads((root / "summary.json").read_text())
    assert summary["why_ended"] == "stopped by the user"
    done = summary["steps_done"]
    assert (root / "checkpoints" / f"step-{done:06d}").is_dir() and (root / "model" / "config.json").is_file()

    assert running.train(root, "--resume", **vision, training__steps=done + 2) == 0, running.output(root)[-3000:]
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps_done"] == done + 2
    account = Ledger(root / "ledger.db").account()
    assert account == {"issued": 16 * (done + 2), "trained": 16 * (done + 2), "pending": 0}
    records = [record for record in read_metrics(root) if "reward" in record]
    assert len(records) == done + 2 and all(record["agreement_mean"] <= 1.0001 for record in records)
    groups = read_rollouts(root / "rollouts", done + 2)
    assert {tuple(each.images[0].pixels.shape) for group in groups for each in group.rollouts} == {(24, 24, 3)}
    assert len({group.rollouts[0].images[0].digest for group in groups}) == len(groups)
    adapter = load_file(root / "adapter" / "adapter_model.safetensors")
    assert all("model.language_model.layers." in name and tensor.any() for name, tensor in adapter.items())
    assert cli.main(["replay", str(root), "--from", str(done + 1), "--to", str(done + 2)]) == 0


def test_rollouts_in_fp8(tmp_path):
    """Engines sleep between versions, and the trainer multiplies what they do; what is saved is not quantized."""
    root = tmp_path / "run"
    settings = dict(placement__mode="colocated", generator__quantization="fp8_per_channel", training__steps=2)
    settings |= dict(float8__recipe_name="rowwise_with_gw_hp")
    begun = time.time()
    assert running.train(root, **settings) == 0, running.output(root)[-3000:]
    said = running.output(root)
    assert "generator.quantization = 'fp8_per_channel'" in said and "importance = 'token', truncate at 2" in said
    assert "Failed to load" not in said and "Enum subclass" not in said, "of torchao's kernels for GPUs"
    assert "disagree about the tokens" not in said
    records = [record for record in read_metrics(root) if "reward" in record]
    exact = agreement_limit("float32", "float32")
    assert [1 < record["agreement_mean"] < exact for record in records] == [True, True], "by the same values"
    assert all(0.9 < record["importance"] < 1.1 and record["ratio"] == 1 for record in records)
    figures = figures_of_run(root, begun, seconds=9.0, gpu_mib=None)
    assert figures["seconds_step"] == records[1]["seconds_step"] and 0 < figures["share_between"] < 1
    assert 0 < figures["seconds_until_up"] <= figures["seconds_to_first_step"] < time.time() - begun
    saved = load_file(root / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32} and not any("scale" in name for name in saved)
