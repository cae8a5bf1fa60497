"""Format of a recipe: a folder with TOMLs, a README and the published curves that a run is compared with.

    recipes/gsm8k/README.md         what it is, in one screen
    recipes/gsm8k/expected.json     reference curves, and variants with the metric and the curves of each (``Expected``)
    recipes/gsm8k/gsm8k-grpo.toml   a variant: an ordinary run

Steps count updates that were done. Where a source counts from 0, its numbers are one larger here.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.io.printable import printable
from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.shipped import find_config

FOLDER = Path(__file__).parents[2] / "recipes"
"""A link to the tree's recipes/; a folder of its own in a wheel."""
EXPECTED = "expected.json"
NOT_MEASURED = "not measured"
Text = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\p{Cc}]+$")]
Label = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\p{Cc}]+$")]
Point = tuple[Annotated[int, Field(ge=0, le=2**53)], Annotated[float, Field(allow_inf_nan=False)]]
"""Step and value."""


@dataclass(kw_only=True)
class Curve:
    """Reference curve: of a published run, of a test's lower bounds, or measured here."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    metric: Text
    """What was measured, in words."""
    source: Annotated[str, Field(max_length=500, pattern=r"^https://[^\s|`]+$|^docs/[^\s|`]+$")]
    """Address of the figures; of this project's own, a page of docs/."""
    points: Annotated[list[Point], Field(min_length=1, max_length=10_000)]
    is_lower_bound: bool = False
    """Whether values are lower bounds that a test asserts, not measurements."""
    seconds_per_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    hardware: Text | None = None


@dataclass(kw_only=True)
class Variant:
    """One run of a recipe."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=80, pattern=r"^[a-z0-9_.-]+$")]
    """Stem of the TOML in the recipe's folder, or the name of one that comes with titan_rl."""
    gpus: Annotated[int, Field(ge=0)]
    """0: a CPU."""
    metric: Text
    """Column of metrics.jsonl that is compared."""
    reference_curves: list[Label] = field(default_factory=list)
    """Labels of published curves."""
    measured: list[Label] = field(default_factory=list)
    """Labels of curves of this variant that were measured here."""


@dataclass(kw_only=True)
class Expected:
    """Contents of expected.json."""

    about: Text
    curves: dict[Label, Curve] = field(default_factory=dict)
    """By label."""
    variants: Annotated[list[Variant], Field(min_length=1)]


@dataclass(frozen=True)
class Recipe:
    """Recipe in a folder."""

    folder: Path
    expected: Expected

    @property
    def name(self) -> str:
        return self.folder.name

    def variant(self, name: str | None) -> Variant:
        """Variant of that name; None: the first. Errors: ConfigError."""
        variants = {variant.name: variant for variant in self.expected.variants}
        if name is not None and name not in variants:
            raise ConfigError(f"recipe {self.name} has no variant {name!r}: {nearest(name, variants)}")
        return variants[name] if name is not None else self.expected.variants[0]

    def curves(self, variant: Variant) -> dict[str, Curve]:
        """Curves of a variant by label, published ones first."""
        return {label: self.expected.curves[label] for label in (*variant.reference_curves, *variant.measured)}

    def toml(self, variant: Variant) -> Path:
        """Path of a variant's TOML. Errors: ConfigError if there is none."""
        own = self.folder / f"{variant.name}.toml"
        path = own if own.is_file() else find_config(variant.name)
        if not path.is_file():
            raise ConfigError(f"recipe {self.name}: there is no {own}, and no shipped TOML of that name; add it")
        return path


def read_recipe(folder: Path) -> Recipe:
    """Recipe of a folder. Errors: ConfigError for an expected.json that is none."""
    path = folder / EXPECTED
    try:
        values = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; a recipe is a folder with an {EXPECTED}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no object: give 'about' and 'variants'")
    try:
        return Recipe(folder, _checked(build_section(Expected, values, EXPECTED)))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {printable(str(error))}") from None


def _checked(expected: Expected) -> Expected:
    """Errors: ConfigError for a variant's curve that is not there."""
    for variant in expected.variants:
        for label in (*variant.reference_curves, *variant.measured):
            if label not in expected.curves:
                known = nearest(label, expected.curves) if expected.curves else "'curves' is empty"
                raise ConfigError(f"{EXPECTED}: variant {variant.name} names the curve {label!r}: {known}")
    return expected


def shipped_recipes() -> dict[str, Recipe]:
    """Recipes that come with the package, by name."""
    return {path.parent.name: read_recipe(path.parent) for path in sorted(FOLDER.glob(f"*/{EXPECTED}"))}


def find_recipe(name: str) -> Recipe:
    """Recipe of a name that comes with the package, or of a folder. Errors: ConfigError."""
    if os.sep in name or name == os.curdir:
        return read_recipe(Path(name))
    names = [path.parent.name for path in FOLDER.glob(f"*/{EXPECTED}")]
    if name not in names:
        raise ConfigError(f"recipe {name!r} is unknown: {nearest(name, names)} A folder of your own is ./{name}")
    return read_recipe(FOLDER / name)
