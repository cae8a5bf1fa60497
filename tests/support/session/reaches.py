"""Private names of dependencies as text: what they stand for, and where docs/development/dependencies.md lists them."""

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from tree import TREE

from titan_rl.compat.reach import Dependency, Reach

PAGE = TREE / "docs" / "development" / "dependencies.md"


def form_of(reach: Reach) -> str:
    """A function's parameters, ``class``, ``annotated`` or ``set`` (by a constructor or a function), else a type."""
    module, _, path = reach.name.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, last = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    if not hasattr(owner, last):
        tables = (
            [vars(kind).get("__annotations__", {}) for kind in inspect.getmro(owner)] if inspect.isclass(owner) else []
        )
        return "annotated" if any(last in table for table in tables) else "set"
    value = getattr(owner, last)
    if isinstance(value, type):
        return "class"
    if inspect.isroutine(value) and (parameters := _parameters(value)) is not None:
        return f"({', '.join(parameters)})"
    return type(value).__name__


def _parameters(function: Any) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def reaches_of(modules: Sequence[ModuleType]) -> list[Reach]:
    return [reach for module in modules for reach in module.REACHES]


def check_forms(dependency: Dependency, modules: Sequence[ModuleType], forms: dict[str, str]) -> None:
    """Every name is there, in the form that is written down, in an installed version that is of the known series."""
    dependency.require(reaches_of(modules))
    assert {reach.name: form_of(reach) for reach in reaches_of(modules)} == forms
    series = dependency.series if dependency.series[0] in "<>" else f"=={dependency.series}"
    assert SpecifierSet(series).contains(dependency.version.partition("+")[0]), (
        f"{dependency.name} {dependency.version}: look at each name again, then raise the series"
    )


def check_page(dependency: Dependency, modules: Sequence[ModuleType], test: str) -> None:
    """docs/development/dependencies.md has a row for each name, with this test, and no other row for this
    dependency."""
    expected = [
        (f"`{reach.name}`", reach.why, f"`{module.__name__.removeprefix('titan_rl.')}`", f"`{test}`")
        for module in modules
        for reach in module.REACHES
    ]
    assert [row for row in rows_of(dependency) if row[2].startswith("`compat.")] == expected


def rows_of(dependency: Dependency) -> list[tuple[str, ...]]:
    """(name, what for, module, test) of each of its names."""
    _, _, section = PAGE.read_text().partition(f"\n## {dependency.name} {dependency.series}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
