"""Recipes: each is whole, its TOMLs are ones of today, and a report says what a run came to."""

import pytest
from tree import TREE

from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import check_together, resolve
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.diagnostics.recipes.recipe import FOLDER, shipped_recipes

RECIPES = shipped_recipes()
VARIANTS = [(name, variant.name) for name, recipe in RECIPES.items() for variant in recipe.expected.variants]
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
