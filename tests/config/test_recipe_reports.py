"""Reports of recipes: what a run came to, whose run it is, and what cannot be read."""

import asyncio
import errno
import json
import math
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from made_run import made_run
from recipe_runs import recipe_folder
from waiting import eventually

from titan_rl.cli import main
from titan_rl.config.io.toml_text import toml_text
from titan_rl.config.load import read_resolved
from titan_rl.diagnostics.bench.memory_watch import MemoryUse
from titan_rl.diagnostics.recipes import command
from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch, parse_used, query
from titan_rl.diagnostics.recipes.report import observed_rows


@pytest.fixture
def reported(tmp_path, capsys):
    """Recipe and a run of it with another seed, and what ``recipe report`` says."""
    run_dir = made_run(tmp_path / "run", run__seed=7)
    config = read_resolved(run_dir.config)
    config["run"] |= {"seed": 1, "dir": ""}
    folder = recipe_folder(tmp_path)
    (folder / "mine.toml").write_text(toml_text(config))

    def report() -> str:
        assert main(["recipe", "report", str(folder), str(run_dir.root)]) == 0
        capsys.readouterr()
        return (run_dir.root / "report.md").read_text()

    return run_dir, report


def test_a_report_has_the_curve_what_differs_and_the_ledger(reported):
    run_dir, report = reported
    text = report()
    assert "| run.seed | `1` | `7` |" in text
    assert text.count("\n| ", text.index("## What differs")) == 3, "a header and the seed, and nothing else"
    assert "| 1 | 0.250 | 0.500 | 1 | +0.250 |" in text and "| 9 | 0.750 | not measured |" in text
    assert "issued 32 = trained 32 + discarded 0 + pending 0; adds up" in text
    assert "steps | 2 of 2; not ended" in text and "memory of all actors | not measured" in text
    assert (run_dir.root / "report.png").read_bytes().startswith(b"\x89PNG") and "](report.png)" in text


def test_a_ledger_that_does_not_add_up_is_said(reported):
    run_dir, report = reported
    with sqlite3.connect(run_dir.ledger) as connection:
        for (name,) in connection.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            connection.execute(f"drop trigger {name}")
        connection.execute("update samples set step = 2 where prompt_id = 'train/0000000'")
    assert "does NOT add up" in report()


def test_text_of_a_run_stays_in_its_cell(reported):
    run_dir, report = reported
    config = json.loads(run_dir.config.read_text())
    config["task"]["system_prompt"] = "a | b\n# heading `x`"
    run_dir.config.write_text(json.dumps(config))
    rows = [line for line in report().splitlines() if "system_prompt" in line]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 4


def test_a_link_in_place_of_the_report_is_not_followed_out_of_the_run(reported, tmp_path):
    run_dir, report = reported
    (tmp_path / "precious").write_text("mine")
    (run_dir.root / "report.md").symlink_to(tmp_path / "precious")
    with pytest.raises(AssertionError):
        report()
    assert (tmp_path / "precious").read_text() == "mine"


def test_memory_of_gpus_is_nvidia_smi_s_at_its_largest(tmp_path, monkeypatch):
    lines = tmp_path / "lines"
    lines.write_text("0, 812\n1, 40960\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu_watch(0.01) as largest:
        asyncio.run(eventually(lambda: largest.get("1") == 40960, "a first look"))
        program.write_text("#!/bin/sh\nexit 9\n")
        asyncio.run(asyncio.sleep(0.1))
        program.write_text(f"#!/bin/sh\ncat {lines}\n")
        lines.write_text("0, 900\n1, 5\n")
        asyncio.run(eventually(lambda: largest.get("0") == 900, "a later one"))
    assert largest == {"0": 900.0, "1": 40960.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert query()[-1] == "--id=2,3"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with gpu_watch(0.01) as largest:
        pass
    assert largest == {} == parse_used("[N/A], [N/A]\nFailed to initialize NVML\n")


def test_what_was_observed_is_rows_of_the_report():
    memory = MemoryUse(3072.0, {"python": 1024.0, "a|b": 2048.0})
    rows = dict(observed_rows(memory, {"0": 512.0, "3": 1024.0}, {"cores": 2}))
    assert rows["largest memory of all actors"] == "3.00 GiB on the host (a\\|b 2.00, python 1.00)"
    assert (rows["largest memory of a GPU, GiB"], rows["machine"]) == ("GPU 0 0.5, GPU 3 1.0", "cores 2")
    assert dict(observed_rows(MemoryUse(), {}, {}))["largest memory of all actors"] == "not measured"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", ""),
        ("summary.json", "[1]"),
        ("summary.json", '{"held_out_before": {"correct": 1, "count": 0}, "held_out_after": {"correct": "x"}}'),
        ("summary.json", '{"held_out_before": {"correct": 9, "count": 3}, "why_ended": ["|"]}'),
        ("config.json", "null"),
        ("config.json", '{"rollout": [], "training": {"steps": {"a": 1}}, "algorithm": 3}'),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1, "reward": 1e308}\n{"step": 2, "loss": 1, "reward": -1e308}'),
        ("metrics.jsonl", '{"step": 9000000000000000000, "loss": 1.0, "reward": 0.5}'),
        ("metrics.jsonl", '{"step": 1, "loss": NaN, "reward": Infinity, "agreement_mean": -1}'),
    ],
)
def test_a_report_of_forged_records_is_a_report_or_one_line(reported, capsys, name, text):
    run_dir, _ = reported
    (run_dir.root / name).write_text(text)
    code = main(["recipe", "report", str(run_dir.root.parent / "mine"), str(run_dir.root)])
    said = capsys.readouterr().err
    assert (code == 0 and (run_dir.root / "report.md").is_file()) or (code == 2 and len(said.splitlines()) == 1)


def test_text_of_a_recipe_stays_in_its_cell(reported):
    run_dir, report = reported
    folder = run_dir.root.parent
    recipe_folder(folder, label="x|y`$\\frac{", curve={"hardware": "|h", "seconds_per_step": 1.0})
    rows = [line for line in report().splitlines() if line.startswith("| seconds")]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 3
    assert (run_dir.root / "report.png").is_file()


def test_a_step_without_agreement_is_beyond_the_limit(reported):
    run_dir, report = reported
    config = json.loads(run_dir.config.read_text())
    config["rollout"]["max_staleness"] = 0
    run_dir.config.write_text(json.dumps(config))
    records = [{"step": step, "loss": 0.1, "agreement_mean": each} for step, each in ((1, 1.0), (2, math.nan))]
    (run_dir.root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "largest nan; BEYOND the limit" in report()


def test_a_run_of_another_device_does_not_differ_by_its_defaults(reported):
    run_dir, report = reported
    config = json.loads(run_dir.config.read_text())
    toml = {name: dict(table) for name, table in read_resolved(run_dir.config).items()}
    toml["generator"] |= {"dtype": "auto", "kv_cache_gib": 0.0}
    toml["training"] = {key: each for key, each in toml["training"].items() if key != "mixed_precision_param"}
    toml["run"] |= {"dir": ""}
    (run_dir.root.parent / "mine" / "mine.toml").write_text(toml_text(toml))
    config["generator"] |= {"dtype": "bfloat16", "kv_cache_gib": 0.0}
    config["training"]["mixed_precision_param"] = "bfloat16"
    run_dir.config.write_text(json.dumps(config))
    text = report()
    assert text[text.index("## What differs") :].strip().endswith("Nothing.")


def test_a_run_s_variant_is_the_one_that_its_settings_are_of(reported, capsys):
    run_dir, _ = reported
    folder = run_dir.root.parent / "mine"
    expected = json.loads((folder / "expected.json").read_text())
    expected["variants"].insert(0, {"name": "other", "gpus": 0, "metric": "reward"})
    (folder / "expected.json").write_text(json.dumps(expected))
    toml = (folder / "mine.toml").read_text()
    (folder / "other.toml").write_text(toml.replace("seed = 1", "seed = 2").replace("lr = ", "lr = 1"))
    assert main(["recipe", "report", str(folder), str(run_dir.root)]) == 0
    assert (run_dir.root / "report.md").read_text().startswith("# mine: mine\n")
    for given in (["gsm8k"], ["gsm8k", "--variant", "gsm8k-ppo"]):
        capsys.readouterr()
        assert main(["recipe", "report", given[0], str(run_dir.root), *given[1:]]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "task.name is" in line


# a run that is driven


@pytest.fixture
def driven(reported, monkeypatch, capsys):
    """Function: run the recipe, whose run ends with a code and leaves some files out, and give what is told."""
    run_dir, _ = reported

    def drive(code: int, *arguments: str, without: tuple[str, ...] = ()) -> tuple[int, str, Path]:
        root = run_dir.root.parent / "driven"

        def train(toml, overrides, resume):
            shutil.copytree(run_dir.root, root, ignore=shutil.ignore_patterns(*without))
            return code

        monkeypatch.setattr(command, "train", train)
        given = ["recipe", "run", str(run_dir.root.parent / "mine"), "--run.dir", str(root), *arguments]
        return main(given), capsys.readouterr().err, root

    return drive


def test_the_exit_code_is_the_run_s_and_what_cannot_be_read_is_told_in_its_place(driven):
    code, told, root = driven(1, without=("ledger.db",))
    assert code == 1 and not told and "ledger | " in (root / "report.md").read_text()
    assert "holds no ledger.db" in (root / "report.md").read_text()


def test_a_recipe_that_needs_an_override_has_its_report(driven, tmp_path):
    (tmp_path / "mine" / "mine.toml").write_text("[task]\nname = 'jsonl'\n[training]\nsteps = 2\n")
    code, told, root = driven(0, "--task.options.file", "rows.jsonl")
    assert code == 0 and not told and "needs task.options.file" in (root / "report.md").read_text()


def test_a_full_disk_while_reporting_is_one_line_and_the_run_s_code(driven, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "replace_text", full)
    code, told, root = driven(0)
    [line] = told.splitlines()
    assert code == 0 and "No space left on device" in line
    assert main(["recipe", "report", str(root.parent / "mine"), str(root)]) == 2


def test_a_run_over_hosts_says_how_to_have_its_report(driven, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(command, "say", lambda text, file=None: said.append(str(text)))
    driven(0, "--hosts.launcher", "attach", "--hosts.addresses", '["tls://a:1"]')
    assert any(line.endswith("--variant mine") and "recipe report" in line for line in said)
