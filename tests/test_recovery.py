"""Runs that meet bad numbers, damaged checkpoints and a full disk; and what replay says of a run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import running

from titan_rl.audit import read_ledger
from titan_rl.checkpoint import CheckpointFolder
from titan_rl.metrics import read_metrics
from titan_rl.rundir import RunDir

pytestmark = pytest.mark.slow
STEPS = 6


def train_with(root: Path, patch: str, *flags: str, **settings) -> int:
    """A run whose controller was changed by ``patch``, which knows it as ``controller``; its exit code."""
    program = f"""
import sys
import numpy as np
import titan_rl.controller as controller
{patch}
from titan_rl.train import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "--run.dir", str(root), *flags, *running.overrides(**settings)]
    with open(root.parent / f"{root.name}.out", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        return process.wait(180)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "titan_rl.cli", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """With a warm-up long enough for groups to differ, and all checkpoints kept."""
    root = tmp_path_factory.mktemp("replay") / "run"
    settings = dict(warmup__steps=60, rollout__prompts_per_step=8, checkpoint__every=2, checkpoint__keep_latest_k=3)
    code = running.train(root, training__steps=STEPS, **settings)
    assert code == 0, running.output(root)[-3000:]
    return root


def test_replay_from_the_base_model_arrives_at_the_same_bits(run):
    said = command("replay", run, "--from", 1, "--to", STEPS, "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads(said.stdout)
    assert result["from"] == "the base model" and result["equal"]
    assert [step["step"] for step in result["steps"]] == list(range(1, STEPS + 1))
    assert sum(step["grad_norm"] > 0 for step in result["steps"]) >= 3, "a run that learned nothing proves nothing"
    assert result["state"]["num_tensors"] > 50 and result["state"]["num_different"] == 0


def test_replay_from_a_checkpoint_finds_the_step_and_the_tensor_that_differ(run, tmp_path):
    """One logprob of step 5 is changed in a copy of the run: step 5 differs, step 4 does not, and weights do."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "rollouts" / "step-000005.parquet"
    table = pq.read_table(path).to_pylist()
    for row in table:
        row["logprobs"] = [value - 0.05 if value else value for value in row["logprobs"]]
    pq.write_table(pq.read_table(path).from_pylist(table, pq.read_schema(path)), path)
    said = command("replay", copy, "--from", 4, "--to", STEPS)
    assert said.returncode == 1, said.stdout + said.stderr
    lines = said.stdout.splitlines()
    assert "step-000002" in lines[0]
    verdicts = {int(line.split()[1]): line.split()[-1] for line in lines if line.startswith("step ")}
    assert verdicts[3] == verdicts[4] == "equal" and verdicts[5] == "DIFFERENT"
    assert "differ, the first model." in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere", "--from", "1", "--to", "2"], "config.json"),
        (["RUN", "--from", "0", "--to", "2"], "--from 0"),
        (["RUN", "--from", "3", "--to", "2"], "--to 2"),
        (["RUN", "--from", "5", "--to", "9"], "step 7 is not recorded"),
        (["WITHOUT", "--from", "3", "--to", "4"], "--from 1"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_and_exit_code_2(run, tmp_path, arguments, word):
    without = tmp_path / "without"
    shutil.copytree(run, without, ignore=shutil.ignore_patterns("step-0000??"))
    names = {"RUN": run, "WITHOUT": without}
    said = command("replay", *(names.get(argument, argument) for argument in arguments))
    assert said.returncode == 2
    assert word in said.stderr and len(said.stderr.strip().splitlines()) == 1, said.stderr


def test_resume_takes_the_checkpoint_before_a_damaged_one_and_accounts_from_there(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    [data] = (root / "checkpoints" / "step-000006").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    settings = dict(warmup__steps=60, rollout__prompts_per_step=8, training__steps=STEPS + 1)
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    said = running.output(root)
    assert (
        "step-000006 is not whole: its __0_0.distcp has" in said
        and f"resumed from {root}/checkpoints/step-000004" in said
    )
    ledger = read_ledger(root, steps=True)
    assert ledger["trained"] == ledger["issued"] == 32 * (STEPS + 1) and ledger["adds_up"]
    assert [step["trained"] for step in ledger["steps"]] == [32] * (STEPS + 1)


def test_resume_with_no_whole_checkpoint_is_told(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    for state in root.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    assert running.train(root, "--resume", training__steps=STEPS + 1) == 2
    said = running.output(root).strip().splitlines()
    assert len(said) == 1 and "no checkpoint" in said[0] and "state.json" in said[0], said


BAD_AT = """
plain, bad_steps = controller.Controller._collect, {bad_steps}
async def collect(self):
    groups = await plain(self)
    if bad_steps and self.progress.step + 1 == bad_steps[0]:
        bad_steps.pop(0)
        rollout = groups[1].rollouts[2]
        rollout.logprobs[-1] = np.nan
        print("INJECTED", rollout.prompt_id, rollout.sample, flush=True)
    return groups
controller.Controller._collect = collect
"""


def injected(root: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()[1:]) for line in running.output(root).splitlines() if line.startswith("INJECTED")]


@pytest.mark.parametrize("recovery", ["skip", "rollback"])
def test_a_batch_with_bad_numbers_is_left_out_and_the_sample_is_named(tmp_path, recovery):
    root = tmp_path / "run"
    code = train_with(
        root,
        BAD_AT.format(bad_steps=[3, 3]),
        recovery__bad_numbers=recovery,
        training__steps=4,
        checkpoint__every=1,
        parallelism__data_parallel_shard_degree=2,
    )
    said = running.output(root)
    assert code == 0, said[-3000:]
    assert len(injected(root)) == 2
    for prompt_id, sample in injected(root):
        assert f"sampling logprob of {prompt_id} sample {sample}" in said
    ledger = read_ledger(root, steps=True)
    assert ledger["discarded"] == {"bad_numbers": 32} and ledger["trained"] == 16 * 4 and ledger["adds_up"]
    assert [step["trained"] for step in ledger["steps"]] == [16] * 4
    assert sorted(path.name for path in root.glob("rollouts/bad-*")) == ["bad-000003-1.parquet", "bad-000003-2.parquet"]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["agreement_mean"] < 1.001 for record in records)
    assert ("resumed from" in said) == (recovery == "rollback")


@pytest.mark.parametrize("bad_steps", [[3, 3], [1, 1]])
def test_too_many_bad_batches_end_the_run_with_a_whole_checkpoint(tmp_path, bad_steps):
    root = tmp_path / "run"
    code = train_with(root, BAD_AT.format(bad_steps=bad_steps), recovery__max_bad_steps=2, training__steps=4)
    said = running.output(root)
    assert code == 1, said[-3000:]
    summary = json.loads((root / "summary.json").read_text())
    assert "BadNumbersError: 2 batches in a row" in summary["why_ended"] and injected(root)[-1][0] in said
    run_dir = RunDir(root)
    path, state = CheckpointFolder(run_dir.checkpoints, 2).newest_whole()
    assert state.step == summary["steps_done"] == bad_steps[0] - 1
    assert running.train(root, "--resume", training__steps=4) == 0, running.output(root)[-3000:]
    ledger = read_ledger(root)
    assert ledger["trained"] == 16 * 4 and ledger["discarded"] == {"bad_numbers": 32} and not ledger["pending"]


def test_a_full_disk_under_the_checkpoints_costs_a_warning(tmp_path):
    root = tmp_path / "run"
    disk = root / "checkpoints"
    patch = f"""
import subprocess
from titan_rl.rundir import RunDir
plain = RunDir.open
def open_on_a_small_disk(self, resolved):
    plain(self, resolved)
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
