"""Recorded steps trained again give the same bits, or tell what differs; and runs go on from whole checkpoints only."""

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import running
import warm_commands

from titan_rl import cli, train
from titan_rl.diagnostics.ledger_report import read_ledger

pytestmark = pytest.mark.slow
STEPS = running.STEPS


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        warm_commands.command("-m", "titan_rl.cli", *arguments), capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def run(finished_run) -> Path:
    return finished_run


def test_replay_from_the_base_model_arrives_at_the_same_bits(run):
    said = command("replay", run, "--from", 1, "--to", STEPS, "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads(said.stdout)
    assert result["from"] == "the base model" and result["equal"] and result["bit_equal"]
    assert [one["device"] for one in result["recorded_on"]] == ["cpu"]
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
def test_what_cannot_be_replayed_is_one_line_and_exit_code_2(run, tmp_path, arguments, word, capsys):
    without = tmp_path / "without"
    shutil.copytree(run, without, ignore=shutil.ignore_patterns("step-0000??"))
    names = {"RUN": str(run), "WITHOUT": str(without)}
    assert cli.main(["replay", *(names.get(argument, argument) for argument in arguments)]) == 2
    said = capsys.readouterr().err.strip()
    assert word in said and "\n" not in said


def test_resume_takes_the_checkpoint_before_a_damaged_one_and_accounts_from_there(run, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    [data] = (root / "checkpoints" / "step-000006").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    settings = dict(sft__steps=60, rollout__prompts_per_step=8, training__steps=STEPS + 1)
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    said = running.output(root)
    assert (
        "step-000006 is not complete: its __0_0.distcp has" in said
        and f"resumed from {root}/checkpoints/step-000004" in said
    )
    ledger = read_ledger(root, steps=True)
    assert ledger["trained"] == ledger["issued"] == 32 * (STEPS + 1) and ledger["adds_up"]
    assert [step["trained"] for step in ledger["steps"]] == [32] * (STEPS + 1)


def test_resume_with_neither_a_whole_checkpoint_nor_all_records_is_told(run, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    for state in root.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    (root / "rollouts" / "step-000002.parquet").unlink()
    settings = running.overrides(**running.FINISHED | {"training__steps": STEPS + 1})
    assert train.main(["--run.dir", str(root), "--resume", *settings]) == 2
    said = capsys.readouterr().err.strip()
    assert "no checkpoint" in said and "state.json" in said and "rollouts of step 2" in said and "\n" not in said
