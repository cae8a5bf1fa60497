"""Recipes: each is whole, its TOMLs are ones of today, and points and settings are compared as said."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from chat_models import make_chat_model
from recipe_runs import OF_CONFIGS, ON_DATA, OWN, RECIPES, VARIANTS, readme_rows, recipe_folder, replaced
from tree import TREE

from titan_rl.cli import main
from titan_rl.config.load import ConfigError, flat, load_config
from titan_rl.controller.preflight.checks import check, check_together, resolve
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.diagnostics.recipes.comparison import (
    Pair,
    compare,
    differences,
    is_within,
    limit_of,
    median_of,
    points_of,
    steps_of,
)
from titan_rl.diagnostics.recipes.picture import style
from titan_rl.diagnostics.recipes.recipe import FOLDER, Curve, read_recipe

MAX_LINES = 40
"""Of a README: one screen."""


def test_every_folder_is_a_recipe():
    assert {path.name for path in (TREE / "recipes").iterdir()} == set(RECIPES) and len(RECIPES) >= 5
    assert FOLDER.resolve() == TREE / "recipes"


@pytest.mark.parametrize("name", RECIPES)
def test_its_readme_has_every_row_and_the_sources_of_its_curves(name):
    recipe = RECIPES[name]
    text = (recipe.folder / "README.md").read_text()
    rows = readme_rows(recipe)
    assert len(text.splitlines()) <= MAX_LINES and all(len(cell) <= 120 for cell in rows.values())
    variants = recipe.expected.variants
    assert all(curve.source in text for curve in recipe.expected.curves.values())
    assert {label for variant in variants for label in recipe.curves(variant)} == set(recipe.expected.curves)
    is_measured = any(variant.measured for variant in variants)
    assert is_measured == (rows["Measured here"] != "not measured"), (
        "what was measured here has a curve, and nothing else has"
    )
    names = {variant.name for variant in variants} | {"constitution"}
    assert {path.stem for path in recipe.folder.glob("*.toml")} <= names


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
    curves = recipe.curves(expected)
    last_steps = []
    for curve in curves.values():
        steps = [step for step, _ in curve.points]
        assert steps == sorted(set(steps)) != []
        last_steps.append(steps[-1])
    assert not curves or min(last_steps) <= checked.titan.training.steps
    published = [curves[label] for label in expected.reference_curves]
    assert not checked.config.sft.steps or all(curve.points[0][0] > 0 for curve in published), "0 is after SFT"


SETTINGS = {
    "gsm8k-grpo": {"algorithm.aggregation": "sequence", "filter.max_refills": 100, "filter.no_signal": True},
    "gsm8k-thinking": {"algorithm.aggregation": "sequence", "filter.max_refills": 100, "filter.no_signal": True},
    "gsm8k-ppo": {
        "optimizer.param_groups.0.optimizer_kwargs.betas": [0.9, 0.999],
        "optimizer.param_groups.0.optimizer_kwargs.weight_decay": 0.01,
        "critic.optimizer.betas": [0.9, 0.999],
        "critic.optimizer.weight_decay": 0.01,
    },
    **{
        name: {
            "algorithm.normalize_std": False,
            "optimizer.param_groups.0.optimizer_kwargs.betas": [0.9, 0.999],
            "optimizer.param_groups.0.optimizer_kwargs.weight_decay": 0.01,
        }
        for name in ("reverse-text", "alphabet-sort", "wordle", "wordle-8gpu")
    },
    "dapo-8gpu": {
        "filter.no_signal": False,
        "algorithm.dual_clip": 10.0,
        "verifier.episode_timeout": 1800,
        "generator.max_num_seqs": 512,
    },
    "search-r1-like": {
        "task.options.held_out_only": ["nq"],
        "lr_scheduler.warmup_steps": 2,
        "optimizer.param_groups.0.optimizer_kwargs.weight_decay": 0.1,
    },
}
"""As the sources have them, where a default is another."""


@pytest.mark.parametrize(("name", "variant"), [each for each in VARIANTS if each[1] in SETTINGS])
def test_its_resolved_settings_are_the_source_s(name, variant):
    recipe = RECIPES[name]
    resolved = flat(resolve(load_config(recipe.toml(recipe.variant(variant)), with_models=False)).as_dict())
    assert {key: resolved.get(key) for key in SETTINGS[variant]} == SETTINGS[variant]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny_chat")


@pytest.mark.parametrize(("name", "variant"), [*OWN, *OF_CONFIGS])
def test_it_passes_every_check_with_another_model_and_rows_in_its_data_s_schema(name, variant, chat_model, tmp_path):
    recipe = RECIPES[name]
    overrides = replaced(name, variant, chat_model, tmp_path)
    checked = check(load_config(recipe.toml(recipe.variant(variant)), overrides))
    if variant in ON_DATA:
        assert checked.dataset is not None and checked.dataset.train
    else:
        assert checked.held_out and checked.task.messages(checked.held_out[0])


def test_names_of_smollm2_are_relations_with_another_task():
    """So that a run of relations is one of both: runs/test_recipe_runs.py leaves names out."""
    recipe = RECIPES["smollm2"]
    names, relations = (
        flat(resolve(load_config(recipe.toml(recipe.variant(variant)), with_models=False)).as_dict())
        for variant in ("smollm2_names", "smollm2_relations")
    )
    other = {key for key in names.keys() | relations.keys() if names.get(key) != relations.get(key)}
    assert other - {"run.dir"} and all(key.startswith("task.") for key in other - {"run.dir"})


# the format


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": -1}, "gpus"),
        ({"gpus": "one"}, "gpus"),
        ({"metrics": "reward"}, "metrics"),
        ({"name": "../mine"}, "name"),
        ({"metric": "a\n# b"}, "metric"),
        ({"reference_curves": ["they"]}, "'them'"),
        ({"label": "x\n## z"}, "curves"),
        ({"label": "x" * 81}, "curves"),
        ({"curve": {"sauce": "x"}}, "sauce"),
        ({"curve": {"source": "hearsay"}}, "source"),
        ({"curve": {"hardware": "h\n## x"}}, "hardware"),
        ({"curve": {"hardware": "h" * 501}}, "hardware"),
        ({"curve": {"points": []}}, "points"),
        ({"curve": {"points": [[0.5, 1]]}}, "points"),
        ({"curve": {"points": [[1, float("nan")]]}}, "points"),
        ({"curve": {"points": [[10**30, 1.0]]}}, "points"),
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
        readme_rows(recipe)


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
        (["list", "--variant", "nope"], "--variant"),
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


def test_each_point_of_a_run_is_compared_with_the_nearest_of_the_reference_or_none():
    measured = [(0, 0.1), (10, 0.2), (98, 0.5), (101, 0.7), (300, 0.6)]
    assert compare([(1, 0.0), (12, 0.3), (100, 0.4), (200, 0.9)], measured) == [
        Pair(1, 0.0),
        Pair(12, 0.3),
        Pair(100, 0.4, 101, 0.7),
        Pair(200, 0.9),
    ]
    assert compare([(0, 0.0), (1, 0.5)], [(0, 0.1)]) == [Pair(0, 0.0, 0, 0.1), Pair(1, 0.5)]
    assert compare([(400, 0.1), (410, 0.2), (420, 0.3)], [(400, 0.5)])[1:] == [Pair(410, 0.2), Pair(420, 0.3)]
    assert compare([(5, 1.0)], []) == [Pair(5, 1.0)] and compare([], [(5, 1.0)]) == []


def test_medians_leave_the_first_step_out_where_there_are_others():
    steps = [{"step": 1, "loss": 0.0, "seconds_step": 90.0}, {"step": 2, "loss": 0.0, "seconds_step": 2.0}]
    assert median_of(steps, "seconds_step") == 2.0 and median_of(steps[:1], "seconds_step") == 90.0
    for nan in (math.nan, math.inf):
        assert math.isnan(median_of([*steps, {"step": 3, "loss": 0.0, "seconds_step": nan}, *steps], "seconds_step"))
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
    exact, loose = limit_of(settings), limit_of(settings | {"generator.dtype": "bfloat16"})
    assert not is_within([1.0, 1.004], exact) and is_within([1.0, 1.004], loose)
    assert is_within([1.0, 1.004], limit_of(settings | {"generator.quantization": "fp8_per_block"}))
    assert limit_of(settings | {"algorithm.updates_per_batch": 4}) == exact
    assert limit_of(settings | {"rollout.max_staleness": 1}) is None
    assert not is_within([1.0, math.nan], loose) and not is_within([1.0, -math.inf], loose)


def test_curves_are_lines_and_bounds_and_single_points_marks():
    curve = Curve(metric="m", source="docs/a.md", points=[(1, 0.5), (2, 0.75)])
    single = dataclasses.replace(curve, points=[(1, 0.5)])
    bounds = dataclasses.replace(curve, is_lower_bound=True)
    assert [style(each)["linestyle"] for each in (curve, single, bounds)] == ["--", "none", "none"]


def test_settings_differ_but_for_places_and_a_model_of_the_cache():
    recipe = {"run.dir": "", "run.seed": 1, "model.path": "Qwen/Qwen3-0.6B", "training.steps": 20, "task.options.k": 1}
    run = {"run.dir": "runs/x", "run.seed": 1, "training.steps": 3, "task.options.j": 2}
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    found = {each.key: (each.recipe, each.run) for each in differences(recipe, run | {"model.path": cached})}
    assert found == {"training.steps": (20, 3), "task.options.k": (1, None), "task.options.j": (None, 2)}
    other = cached.replace("0.6B", "0.6B-Base")
    assert "model.path" in {each.key for each in differences(recipe, run | {"model.path": other})}
