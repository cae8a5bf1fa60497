"""Runs that meet non-finite values or a full disk: what they say, what they leave out, how they end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import running

from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir

pytestmark = pytest.mark.slow


def train_with(root: Path, patch: str, *flags: str, **settings) -> int:
    """A run whose controller was changed by ``patch``, which knows it as ``controller``; its exit code."""
    program = f"""
import sys
import numpy as np
import titan_rl.controller.loop.controller as controller
{patch}
from titan_rl.train import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "--run.dir", str(root), *flags, *running.overrides(**settings)]
    with open(root.parent / f"{root.name}.out", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        return process.wait(180)


BAD_AT = """
plain, bad_steps = controller.Controller.sample, {bad_steps}
async def sample(self):
    collected = await plain(self)
    if bad_steps and self.progress.step + 1 == bad_steps[0]:
        bad_steps.pop(0)
        rollout = collected.groups[1].rollouts[2]
        rollout.logprobs[-1] = np.nan
        print("INJECTED", rollout.prompt_id, rollout.sample, flush=True)
    return collected
controller.Controller.sample = sample
"""


def injected(root: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()[1:]) for line in running.output(root).splitlines() if line.startswith("INJECTED")]


def test_a_return_to_the_last_checkpoint_makes_its_steps_anew(tmp_path):
    """Two ranks. Step 4 is bad twice; the checkpoint is of step 2, so step 3 is made a second and a third time."""
    root = tmp_path / "run"
    code = train_with(
        root,
        BAD_AT.format(bad_steps=[4, 4]),
        recovery__nonfinite="rollback",
        training__steps=5,
        checkpoint__every=2,
        parallelism__data_parallel_shard_degree=2,
    )
    said = running.output(root)
    assert code == 0, said[-3000:]
    assert len(injected(root)) == 2 and said.count(f"back to {root}/checkpoints/step-000002") == 2
    for prompt_id, sample in injected(root):
        assert f"sampling logprob of {prompt_id} sample {sample}" in said
    ledger = read_ledger(root, steps=True)
    assert ledger["discarded"] == {"nonfinite": 32} and ledger["trained"] == 16 * 5 and ledger["adds_up"]
    assert [step["trained"] for step in ledger["steps"]] == [16] * 5
    assert sorted(path.name for path in root.glob("rollouts/bad-*")) == ["bad-000004-1.parquet", "bad-000004-2.parquet"]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["agreement_mean"] < 1.001 for record in records)


def test_bad_batches_are_left_out_and_too_many_end_the_run_with_a_whole_checkpoint(tmp_path):
    """One at step 2 is left out; two in a row at step 4 are too many."""
    root = tmp_path / "run"
    patch = BAD_AT.format(bad_steps=[2, 4, 4])
    code = train_with(root, patch, recovery__max_nonfinite_steps=2, training__steps=5)
    said = running.output(root)
    assert code == 1, said[-3000:]
    assert len(injected(root)) == 3
    assert all(f"sampling logprob of {prompt_id} sample {sample}" in said for prompt_id, sample in injected(root))
    summary = json.loads((root / "summary.json").read_text())
    assert "NonfiniteBatchesError: 2 batches in a row" in summary["why_ended"] and injected(root)[-1][0] in said
    _, state = CheckpointFolder(RunDir(root).checkpoints, 2).newest_complete()
    assert state.step == summary["steps_done"] == 3
    assert running.train(root, "--resume", training__steps=5) == 0, running.output(root)[-3000:]
    ledger = read_ledger(root)
    assert ledger["trained"] == 16 * 5 and ledger["discarded"] == {"nonfinite": 48} and not ledger["pending"]


def test_a_full_disk_under_the_checkpoints_costs_a_warning(tmp_path):
    root = tmp_path / "run"
    disk = root / "checkpoints"
    patch = f"""
import subprocess
from titan_rl.records.run_directory.rundir import RunDir
plain = RunDir.open
def open_on_a_small_disk(self, *arguments):
    plain(self, *arguments)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=13m", "tmpfs", "{disk}"], check=True)
RunDir.open = open_on_a_small_disk
"""
    try:
        code = train_with(root, patch, training__steps=4, checkpoint__every=2)
        said = running.output(root)
        if "mount" in said and code != 0:
            pytest.skip("no tmpfs can be mounted here")
        assert code == 0, said[-3000:]
        assert "warning: step 4 could not be saved" in said and "checkpoints that stay: 2" in said
        folder = CheckpointFolder(disk, 2)
        assert folder.steps() == [2] and folder.flaw(2) is None
        failed = {int(record["step"]): record.get("checkpoint_failed") for record in read_metrics(root)}
        assert failed[2] == 0 and failed[4] == 1
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True)
