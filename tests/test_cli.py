"""Commands, without any process started: what they list, and what they say to a mistake."""

import pytest
import running

from titan_rl import train
from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.controller.session import one_line
from titan_rl.diagnostics.bench.harness import BENCHES, machine, row, run_bench


def test_tasks_are_listed_without_the_refused(capsys):
    assert main(["tasks"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == "jsonl" and "gcd" in listed and "countdown" not in listed and listed[1:] == sorted(listed[1:])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["eval", "nowhere", "--task", "gcd"], "config.json"),
        (["eval", "tiny"], "directory"),
        (["bench", "stp"], "'step'"),
        (["model", "tiny", "somewhere", "--run.sed", "1"], "'seed'"),
        (["train", "x.toml", "--bad"], "--section.key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, word, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("titan-rl: ") and word in said and "\n" not in said


def test_smollm2_is_not_fetched_over_something(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["model", "smollm2", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_tiny_model_is_written(tmp_path):
    from transformers import AutoModelForCausalLM

    assert main(["model", "tiny", str(tmp_path / "tiny")]) == 0
    assert 600_000 < AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").num_parameters() < 2_000_000


def test_a_row_says_whether_its_bar_holds():
    assert row("step", 0.2, "s", 0.3)["met"] and not row("step", 0.4, "s", 0.3)["met"]
    assert row("ratio", 0.96, "", 0.95, at_most=False)["met"] and not row("ratio", 0.9, "", 0.95, at_most=False)["met"]
    assert "met" not in row("free", 1.0, "s")


def test_benches_are_known_and_the_machine_is_told():
    with pytest.raises(ConfigError, match="step"):
        run_bench("stp", {})
    assert set(BENCHES) >= {"step", "generate", "step-smollm2"} and machine()["cores"] >= 1


def test_the_benches_are_listed(capsys):
    assert main(["bench", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(BENCHES)


def test_a_remote_traceback_becomes_one_line():
    error = RuntimeError("Actor call generator0.generate failed.\n Traceback\n  File ...\nValueError: no room\n\n")
    assert one_line(error) == "RuntimeError: Actor call generator0.generate failed. ValueError: no room"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(task__name="countdown"), "Python"),
        (dict(rollout__group_size=1), "rollout.group_size"),
        (dict(model__path="."), "config.json"),
        (dict(parallelism__tensor_parallel_degree=8), "num_attention_heads"),
        (dict(parallelism__context_parallel_degree=2), "context_parallel_degree"),
        (dict(mesh__transport="cuda_ipc"), "GPU"),
        (dict(mesh__transport="rdma_ibverbs"), "rdma_tcp"),
        (dict(generator__tensor_parallel=3), "num_attention_heads"),
        (dict(algorithm__name="gpro"), "grpo"),
        (dict(algorithm__name="supervised"), "[sft]"),
    ],
)
def test_a_wrong_config_starts_nothing(settings, word, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--run.dir", "run", *running.overrides(**settings)]) == 2
    captured = capsys.readouterr()
    [line] = (captured.out + captured.err).strip().splitlines()
    assert word in line, line
    assert not (tmp_path / "run").exists()
