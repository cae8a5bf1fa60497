"""Suites during runs and alone, with real actors: every answer is there, and the weights are those of the step."""

import json
import subprocess

import pyarrow.parquet as pq
import pytest
import running
import warm_commands

from titan_rl.records.metrics import read_metrics

ROWS = [
    {"question": f"Tom has {n} apples and buys {n + 2}. How many?", "answer": f"{n}+{n + 2}\n#### {2 * n + 2}"}
    for n in range(20)
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def suites(file, settings: str) -> str:
    return f'[{{name = "gsm8k", file = "{file}", max_new_tokens = 8, {settings}}}]'


def answers(path) -> list[tuple[str, int, str]]:
    rows = pq.read_table(path).to_pylist()
    return [(row["question"], row["sample"], row["answer"]) for row in rows]


def evaluate(*arguments) -> str:
    command = warm_commands.command("-m", "titan_rl.cli", "eval", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_on_data_is_evaluated_with_the_weights_of_its_step_and_so_is_its_model_alone(tmp_path, file):
    root = tmp_path / "sft"
    settings = dict(data__file="task", algorithm__name="sft", sft__steps=0, training__steps=4, data__made_rows=256)
    asked = suites(file, "k = 1")
    assert running.train(root, eval__suites=asked, eval__every=2, **settings) == 0, running.output(root)[-3000:]
    folders = sorted((root / "evaluations").iterdir())
    assert [folder.name for folder in folders] == ["step-000000", "step-000002", "step-000004"]
    first, _, last = (answers(folder / "gsm8k.parquet") for folder in folders)
    assert len(first) == len(last) == 20 and first != last, "four steps change what is written"
    metrics = {int(record["step"]): record for record in read_metrics(root)}
    assert "eval/gsm8k/pass@1" in metrics[2] and "held_out_loss" in metrics[2]

    alone = tmp_path / "alone"
    evaluate(root / "model", "--suite", "gsm8k", "--file", file, "--max-new-tokens", "8", "--out", alone)
    assert answers(alone / "gsm8k.parquet") == last


def test_a_run_records_twenty_questions_of_four_answers_under_their_names(tmp_path, file):
    root = tmp_path / "run"
    asked = suites(file, "k = 2, samples = 4, temperature = 0.7")
    assert running.train(root, eval__suites=asked, training__steps=1, sft__steps=0) == 0, running.output(root)[-3000:]
    [begun, ended] = [record for record in read_metrics(root) if "eval/gsm8k/avg@4" in record]
    assert (begun["step"], ended["step"]) == (0, 1) and "held_out_accuracy" in begun
    names = {name for name in ended if name.startswith("eval/")}
    assert names == {
        f"eval/gsm8k/{name}"
        for name in (
            *("avg@4", "pass@2", "majority@4", "flexible/avg@4", "flexible/pass@2"),
            *("truncated", "response_length"),
        )
    }
    table = pq.read_table(root / "evaluations" / "step-000001" / "gsm8k.parquet").to_pylist()
    assert len(table) == 80 and {row["sample"] for row in table} == {0, 1, 2, 3}
    assert {row["expected"] for row in table} == {row["answer"].split("#### ")[1] for row in ROWS}
    record = json.loads((root / "evaluations" / "step-000001" / "gsm8k.json").read_text())
    assert record["metrics"]["avg@4"]["value"] == ended["eval/gsm8k/avg@4"]
    assert "gsm8k.file" in (root / "sources.json").read_text()
