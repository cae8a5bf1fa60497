"""Format of a recipe: a folder with TOMLs, a README and the published curves that a run is held beside.

    recipes/gsm8k/README.md         what it is, with the rows of README_ROWS
    recipes/gsm8k/expected.json     its variants, and for each the metric and the curves, as ``Expected`` has them
    recipes/gsm8k/gsm8k-grpo.toml   a variant: an ordinary run

Steps count updates that were done. Where a source counts from 0, its numbers are one larger here.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from titan_rl.config.io.bounded_files import read_json, read_text
from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.shipped import find_config

FOLDER = Path(__file__).parents[2] / "recipes"
"""A link to the tree's recipes/; a folder of its own in a wheel."""
EXPECTED, README = "expected.json", "README.md"
README_ROWS = ("What", "Model", "Data", "Hardware", "Seconds a step", "Published", "Ours")
"""Rows of the README's first table."""
NOT_MEASURED = "not measured"
_ROW = re.compile(r"\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|")
Text = Annotated[str, Field(min_length=1, max_length=500)]
Point = tuple[Annotated[int, Field(ge=0)], float]
"""Step and value."""


@dataclass(kw_only=True)
class Curve:
    """A curve of somebody's run, or a bound that somebody holds runs to."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    label: Text
    metric: Text
    """What was measured, in words."""
    source: Annotated[str, Field(pattern=r"^https://[^\s]+$|^docs/[^\s]+$")]
    """Address of the figures; of our own, a page of docs/."""
    points: list[Point]
    is_bound: bool = False
    """Whether values are lower bounds of a test, not measurements."""
    seconds_per_step: Annotated[float, Field(gt=0)] | None = None
    hardware: str = ""


@dataclass(kw_only=True)
class Variant:
    """One run of a recipe."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")]
    """Stem of the TOML beside it, or the name of one that comes with titan_rl."""
    gpus: Annotated[int, Field(ge=0)]
    """0: a CPU."""
    metric: Text
    """Of metrics.jsonl: what is drawn beside the curves."""
    curves: list[Curve] = field(default_factory=list)
    ours: list[Curve] = field(default_factory=list)
    """Of this variant, measured here."""


@dataclass(kw_only=True)
class Expected:
    """Contents of expected.json."""

    about: Text
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

    def toml(self, variant: Variant) -> Path:
        """Path of a variant's TOML. Errors: ConfigError if there is none."""
        beside = self.folder / f"{variant.name}.toml"
        path = beside if beside.is_file() else find_config(variant.name)
        if not path.is_file():
            raise ConfigError(f"recipe {self.name}: there is no {beside}, and no shipped TOML of that name; add it")
        return path

    def readme_rows(self) -> dict[str, str]:
        """Rows of the README's first table. Errors: ConfigError; OSError."""
        rows = dict(_ROW.findall(read_text(self.folder / README)))
        if missing := [name for name in README_ROWS if not rows.get(name)]:
            raise ConfigError(f"{self.folder / README} has no row {missing[0]!r} in its table: add it")
        return {name: rows[name] for name in README_ROWS}


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
        return Recipe(folder, build_section(Expected, values, EXPECTED))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


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
