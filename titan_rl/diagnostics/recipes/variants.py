"""Variant of a recipe that a run is of, and what differs between their settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.errors import ConfigError
from titan_rl.config.load import as_dict, flat, load_config
from titan_rl.diagnostics.recipes.comparison import Difference, differences
from titan_rl.diagnostics.recipes.recipe import Recipe, Variant

_IDENTITY = ("task.name", "algorithm.name")
"""Settings without which a run is not of a variant."""


def differences_from(recipe: Recipe, variant: Variant, settings: Mapping[str, Any]) -> list[Difference]:
    """Settings of a run that are not the variant's; defaults by device are those of the run's device. Errors:
    ConfigError."""
    from titan_rl.controller.preflight.checks import resolve  # seconds, which `recipe list` need not wait for

    config = load_config(recipe.toml(variant), with_models=False)
    by_device = [differences(flat(resolve(config, on_cpu=on_cpu).as_dict()), settings) for on_cpu in (True, False)]
    return min(by_device, key=len)


def variant_of(recipe: Recipe, settings: Mapping[str, Any], root: Path) -> Variant:
    """Variant that a run is of: the one with its task and algorithm, and of these the one that differs least. Errors:
    ConfigError if it is of none."""
    variants = [variant for variant in recipe.expected.variants if _is_of(recipe, variant, settings)]
    if not variants:
        raise ConfigError(f"{root} is no run of {recipe.name}: its {_identity(settings)}; give a run of the recipe")
    return min(variants, key=lambda variant: _distance(recipe, variant, settings))


def check_variant(recipe: Recipe, variant: Variant, settings: Mapping[str, Any], root: Path) -> None:
    """Errors: ConfigError for a run of another task or algorithm."""
    if not _is_of(recipe, variant, settings):
        raise ConfigError(f"{root} is no run of {variant.name}: its {_identity(settings)}; give another --variant")


def _is_of(recipe: Recipe, variant: Variant, settings: Mapping[str, Any]) -> bool:
    own = flat(as_dict(load_config(recipe.toml(variant), with_models=False)))
    return all(own.get(name) == settings.get(name) for name in _IDENTITY)


def _identity(settings: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} is {settings.get(name)!r}" for name in _IDENTITY)


def _distance(recipe: Recipe, variant: Variant, settings: Mapping[str, Any]) -> float:
    """Number of settings that differ; infinite where they cannot be compared."""
    try:
        return len(differences_from(recipe, variant, settings))
    except ConfigError:
        return float("inf")
