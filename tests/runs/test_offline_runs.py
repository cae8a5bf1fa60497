"""Runs without a generator, through the real trainer actors: only they start, and neither a kill nor a replay changes a
number."""

import json
import os
import shutil
import signal
import time

import pytest
from row_tasks import write
from running import gone, output, start, train

from titan_rl import cli
from titan_rl.config.load import ConfigError, load_resolved
from titan_rl.controller.preflight.checks import resolve, with_dataset
from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.diagnostics.replay.batches import DataReplay
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.run_directory.rundir import RunDir

pytestmark = pytest.mark.slow
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
    with pytest.raises(ConfigError, match="is a run on data.file, which samples nothing"):
        read_ledger(undisturbed)


@pytest.mark.confirms
def test_a_killed_controller_goes_on_with_the_same_numbers(undisturbed, tmp_path):
    root = tmp_path / "killed"
    process = start(root, **SETTINGS)
    wait_for_step(process, root, 6)
    process.kill()
    process.wait()
    assert gone({process.pid})
    assert train(root, "--resume", **SETTINGS) == 0, output(root)[-3000:]
    assert numbers(root) == numbers(undisturbed)


@pytest.mark.confirms
def test_a_killed_rank_goes_on_with_the_same_numbers(undisturbed, tmp_path):
    root = tmp_path / "rank"
    process = start(root, **SETTINGS)
    wait_for_step(process, root, 5)
    [pid] = [e["pid"] for e in read_events(root) if e["kind"] == "started" and e["name"] == "trainer rank 0"]
    os.kill(pid, signal.SIGKILL)
    assert process.wait(180) == 0, output(root)[-3000:]
    assert [event["kind"] for event in read_events(root)].count("trainer_repaired") == 1
    assert numbers(root) == numbers(undisturbed)


# replay


def replay(root, first: int, last: int, capsys) -> tuple[int, dict]:
    code = cli.main(["replay", str(root), "--from", str(first), "--to", str(last), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_replay_from_the_base_model_arrives_at_the_same_bits(undisturbed, capsys):
    """Its SFT steps included, and the policy as it was after them, which KTO compares with."""
    code, result = replay(undisturbed, 1, 12, capsys)
    assert code == 0 and result["equal"] and result["from"] == "the base model"
    assert [step["step"] for step in result["steps"]] == list(range(1, 13))
    assert all(step["grad_norm"] > 0 for step in result["steps"])
    assert result["state"]["num_tensors"] > 50 and result["state"]["num_different"] == 0


@pytest.mark.confirms
def test_a_replay_from_a_checkpoint_finds_the_step_that_had_other_rows(undisturbed, tmp_path, capsys):
    """A copy of the run that says that a row of step 11 was left out of it: steps 9 and 10 are the same."""
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed, copy)
    row = drawn(copy, 11)[0]
    record = {"row": row, "why": "loss", "from_step": 11}
    (copy / "left_out_rows.jsonl").write_text(json.dumps(record) + "\n")
    code, result = replay(copy, 9, 12, capsys)
    assert code == 1 and result["from"].endswith("step-000008") and not result["equal"]
    assert {step["step"]: step["equal"] for step in result["steps"]} == {9: True, 10: True, 11: False, 12: False}
    assert result["state"]["num_different"] > 0


def drawn(root, step: int) -> list[str]:
    """Rows of a step of a run, by their places."""
    run_dir = RunDir(root)
    checked = with_dataset(resolve(load_resolved(run_dir.config)))
    steps = DataReplay(run_dir, checked)._steps
    return [example.place for example in steps.examples(step)]


@pytest.mark.confirms
def test_a_run_leaves_a_bad_row_out_and_its_replay_does_too(tmp_path, capsys):
    """A margin that float32 cannot hold: its pair is named once, and the run goes on without it."""
    rows = [{"prompt": f"{n}=", "chosen": "aa", "rejected": "b" * (1 + n % 3)} for n in range(30)]
    rows[6]["margin"] = 1e300
    write(tmp_path, rows, "pairs.jsonl")
    write(tmp_path, [rows[0] | {"prompt": "held out="}], "held_out.jsonl")
    root, line = tmp_path / "run", "pairs.jsonl line 7"
    unread = ("data__made_rows", "sft__examples_per_step")  # of rows in a file, and without SFT
    settings = {name: value for name, value in SETTINGS.items() if name not in unread}
    settings |= {"algorithm__name": "reward_model", "sft__steps": 0, "training__steps": 6}
    settings |= {"data__file": str(tmp_path / "pairs.jsonl"), "data__held_out_file": str(tmp_path / "held_out.jsonl")}
    assert train(root, **settings) == 0, output(root)[-3000:]
    [record] = [json.loads(text) for text in (root / "left_out_rows.jsonl").read_text().splitlines()]
    assert record["row"] == line and record["why"] == "loss" and 1 <= record["from_step"] <= 4
    assert output(root).count(f"loss of {line}; the update was left out") == 1 and len(numbers(root)) == 6
    code, result = replay(root, 1, 6, capsys)
    assert code == 0 and len(result["steps"]) == 6 and result["state"]["num_different"] == 0
    (tmp_path / "pairs.jsonl").write_text((tmp_path / "pairs.jsonl").read_text().replace("bbb", "bbc"))
    assert cli.main(["replay", str(root), "--from", "1", "--to", "6"]) == 2
    said = capsys.readouterr().err.strip()
    assert "data.file is not what" in said and "\n" not in said
