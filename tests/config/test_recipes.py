"""Recipes: each is whole, its TOMLs are ones of today, and a report says what a run came to."""

import asyncio
import json
import os
import re
import sqlite3
from pathlib import Path

import pytest
from chat_models import make_chat_model
from made_run import made_run
from recipe_runs import OWN, RECIPES, VARIANTS, replaced
from tree import TREE
from waiting import eventually

from titan_rl.cli import main
from titan_rl.config.io.toml_text import toml_text
from titan_rl.config.load import ConfigError, load_config, read_resolved
from titan_rl.controller.preflight.checks import check, check_together, resolve
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.diagnostics.recipes.comparison import (
    Pair,
    agreement_of,
    beside,
    differences,
    median_of,
    points_of,
    steps_of,
)
from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch, parse_used
from titan_rl.diagnostics.recipes.recipe import FOLDER, read_recipe

MAX_LINES = 40
"""Of a README: one screen."""


def test_every_folder_is_a_recipe():
    assert {path.name for path in (TREE / "recipes").iterdir()} == set(RECIPES) and len(RECIPES) >= 5
    assert FOLDER.resolve() == TREE / "recipes"


@pytest.mark.parametrize("name", RECIPES)
def test_its_readme_has_every_row_and_the_sources_of_its_curves(name):
    recipe = RECIPES[name]
    text = (recipe.folder / "README.md").read_text()
    rows = recipe.readme_rows()
    assert len(text.splitlines()) <= MAX_LINES and all(len(cell) <= 120 for cell in rows.values())
    variants = recipe.expected.variants
    assert all(curve.source in text for variant in variants for curve in (*variant.curves, *variant.ours))
    is_measured = any(variant.ours for variant in variants)
    assert is_measured == (rows["Ours"] != "not measured"), "what was measured here has a curve, and nothing else has"
    assert {path.stem for path in recipe.folder.glob("*.toml")} <= {variant.name for variant in variants}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_its_toml_has_known_keys_that_a_run_reads(name, variant):
    recipe = RECIPES[name]
    checked = resolve(load_config(recipe.toml(recipe.variant(variant)), with_models=False))
    check_read(checked.config, checked.algorithm, checked.titan, checked.task)
    check_together(checked.config, checked.titan)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_published_points_are_in_order_and_of_a_run_that_gets_there(name, variant):
    recipe = RECIPES[name]
    expected = recipe.variant(variant)
    checked = resolve(load_config(recipe.toml(expected), with_models=False))
    for curve in (*expected.curves, *expected.ours):
        steps = [step for step, _ in curve.points]
        assert steps == sorted(set(steps)) != []
        assert any(step <= checked.titan.training.steps for step in steps), curve.label


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny_chat")


@pytest.mark.parametrize(("name", "variant"), OWN)
def test_it_passes_every_check_with_another_model_and_rows_in_its_data_s_schema(name, variant, chat_model, tmp_path):
    recipe = RECIPES[name]
    overrides = replaced(name, variant, chat_model, tmp_path)
    checked = check(load_config(recipe.toml(recipe.variant(variant)), overrides))
    assert checked.held_out and checked.task.messages(checked.held_out[0])


# the format


def recipe_folder(tmp_path, **changes):
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    curve = {"label": "them", "metric": "reward", "source": "https://example.org/run", "points": [[1, 0.25], [9, 0.75]]}
    variant = {"name": "mine", "gpus": 0, "metric": "reward", "curves": [curve]} | changes
    (folder / "expected.json").write_text(json.dumps({"about": "a test", "variants": [variant]}))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": -1}, "gpus"),
        ({"gpus": "one"}, "gpus"),
        ({"metrics": "reward"}, "metrics"),
        ({"name": "../mine"}, "name"),
        ({"curves": [{"label": "x"}]}, "metric"),
        ({"curves": [{"label": "x", "metric": "y", "source": "hearsay", "points": []}]}, "source"),
        ({"curves": [{"label": "x", "metric": "y", "source": "docs/a.md", "points": [[0.5, 1]]}]}, "points"),
    ],
)
def test_a_mistake_in_expected_json_is_one_line_with_its_place(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        read_recipe(recipe_folder(tmp_path, **changes))
    [line] = str(caught.value).splitlines()
    assert words in line and "expected.json" in line


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"about": "x", "variants": []}'])
def test_what_is_no_recipe_is_one_line(tmp_path, text):
    (tmp_path / "expected.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_readme_without_a_row_is_named(tmp_path):
    recipe = read_recipe(recipe_folder(tmp_path))
    (recipe.folder / "README.md").write_text("| What | a test |\n| Model | tiny |\n")
    with pytest.raises(ConfigError, match="no row 'Data'"):
        recipe.readme_rows()


# the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], "'list'"),
        (["run"], "recipe run NAME"),
        (["run", "gsm9k"], "'gsm8k'"),
        (["run", "gsm8k", "runs/x"], "recipe run NAME"),
        (["run", "gsm8k", "--variant", "gsm8k-pp"], "'gsm8k-ppo'"),
        (["run", "gsm8k", "--json"], "--json"),
        (["run", "gsm8k", "--rollout.group_siz", "4"], "group_size"),
        (["run", "./nowhere"], "nowhere"),
        (["run", "gsm8k", "--resume"], "nothing to resume"),
        (["run", "gsm8k", "--run.dir.deeper", "x"], "run.dir"),
        (["list", "gsm8k"], "recipe list"),
        (["list", "--run.seed", "1"], "--run"),
        (["report", "gsm8k"], "recipe report NAME RUN"),
        (["report", "gsm8k", "nowhere"], "nowhere"),
        (["report", "gsm8k", ".", "--resume"], "--resume"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and not list(tmp_path.iterdir())


def test_recipes_are_listed_with_their_tomls(capsys):
    assert main(["recipe", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for pair in VARIANTS for name in pair)
    assert main(["recipe", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["recipe"], each["variant"]) for each in listed] == VARIANTS
    assert all(Path(each["toml"]).is_file() for each in listed)


# the report's arithmetic


def test_published_points_meet_the_nearest_of_the_run_s_or_none():
    ours = [(0, 0.1), (10, 0.2), (98, 0.5), (300, 0.6)]
    pairs = beside([(1, 0.0), (12, 0.3), (100, 0.4), (200, 0.9)], ours)
    assert [(pair.step, pair.at, pair.ours) for pair in pairs] == [
        (1, 0, 0.1),
        (12, None, None),
        (100, 98, 0.5),
        (200, None, None),
    ]
    assert pairs[2].difference == pytest.approx(0.1) and pairs[1].difference is None
    assert beside([(5, 1.0)], []) == [Pair(5, 1.0)]


def test_medians_leave_the_first_step_out_where_there_are_others():
    steps = [{"step": 1, "loss": 0.0, "seconds_step": 90.0}, {"step": 2, "loss": 0.0, "seconds_step": 2.0}]
    assert median_of(steps, "seconds_step") == 2.0 and median_of(steps[:1], "seconds_step") == 90.0
    assert median_of(steps, "tokens") is None and median_of([], "seconds_step") is None
    assert steps_of([{"step": 0, "held_out_accuracy": 1.0}, *steps]) == steps
    assert points_of([{"step": 0, "x": 1.0}, {"step": 1}, {"step": 2, "x": 3.0}], "x") == [(0, 1.0), (2, 3.0)]


def test_agreement_has_a_limit_on_policy_alone():
    settings = {
        "rollout.max_staleness": 0,
        "algorithm.updates_per_batch": 1,
        "generator.dtype": "float32",
        "training.mixed_precision_param": "float32",
    }
    steps = [{"step": 1, "agreement_mean": 1.0}, {"step": 2, "agreement_mean": 1.004}]
    found = agreement_of(steps, settings)
    assert (found.mean, found.largest, found.holds) == (pytest.approx(1.002), 1.004, False)
    assert agreement_of(steps, settings | {"generator.dtype": "bfloat16"}).holds
    assert agreement_of(steps, settings | {"rollout.max_staleness": 1}).holds is None
    assert agreement_of([{"step": 1}], settings) is None


def test_settings_differ_but_for_places_and_a_model_of_the_cache():
    recipe = {"run.dir": "", "run.seed": 1, "model.path": "Qwen/Qwen3-0.6B", "training.steps": 20, "task.options.k": 1}
    run = {"run.dir": "runs/x", "run.seed": 1, "training.steps": 3, "task.options.j": 2}
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    found = {each.key: (each.recipe, each.run) for each in differences(recipe, run | {"model.path": cached})}
    assert found == {"training.steps": (20, 3), "task.options.k": (1, None), "task.options.j": (None, 2)}
    other = cached.replace("0.6B", "0.6B-Base")
    assert "model.path" in {each.key for each in differences(recipe, run | {"model.path": other})}


# a run's report


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


def test_a_report_says_what_differs_beside_the_curve_and_the_ledger(reported):
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
        lines.write_text("0, 900\n1, 5\n")
        asyncio.run(eventually(lambda: largest.get("0") == 900, "a later one"))
    assert largest == {"0": 900.0, "1": 40960.0}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with gpu_watch(0.01) as largest:
        pass
    assert largest == {} == parse_used("[N/A], [N/A]\nFailed to initialize NVML\n")


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
        ("metrics.jsonl", '{"step": 1, "loss": NaN, "reward": Infinity, "agreement_mean": -1}'),
    ],
)
def test_a_report_of_forged_records_is_a_report_or_one_line(reported, capsys, name, text):
    run_dir, _ = reported
    (run_dir.root / name).write_text(text)
    code = main(["recipe", "report", str(run_dir.root.parent / "mine"), str(run_dir.root)])
    said = capsys.readouterr().err
    assert (code == 0 and (run_dir.root / "report.md").is_file()) or (code == 2 and len(said.splitlines()) == 1)
