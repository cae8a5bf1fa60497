"""Tests that a page names, such as ``mesh/processes/test_calls.py::test_blame``, and whether ``.ci/run`` runs them."""

import ast
import re
from fnmatch import fnmatch

from tree import TREE

TESTS = TREE / "tests"
LEFT_OUT = {"confirms", "skip", "gpu", "rdma"}
"""Marks of tests that ``.ci/run`` leaves out. A skip with a condition is none: one that is not expected fails it."""


def section(page: str, heading: str) -> str:
    """Text below a heading, up to the next one of its level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows_of(text: str) -> list[list[str]]:
    """Cells of the rows of a page's tables, without their heads."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heads = {place - 1 for place, cells in enumerate(rows) if set(cells[0]) == {"-"}}
    return [cells for place, cells in enumerate(rows) if not {place, place - 1} & heads]


def witnesses_of(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def is_run_by_ci(witness: str) -> bool:
    """Whether the test, or some test of the file, is there and has no mark that leaves it out."""
    file, _, name = witness.partition("::")
    if not (TESTS / file).is_file():
        return False
    tree = ast.parse((TESTS / file).read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    if _marks(assigned.get("pytestmark"), assigned) & LEFT_OUT:
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = [each for each in functions if each.name == name or (not name and each.name.startswith("test_"))]
    marks = (set().union(*(_marks(mark, assigned) for mark in each.decorator_list)) for each in named)
    return any(not found & LEFT_OUT for found in marks) and not _is_expected_to_be_skipped(witness)


def _marks(expression: ast.AST | None, assigned: dict[str, ast.expr]) -> set[str]:
    """Names of pytest's marks in an expression, also of those that the module has under a name of its own."""
    if expression is None:
        return set()
    found = {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} & assigned.keys()
    others = {name: value for name, value in assigned.items() if name not in names}
    return found.union(*(_marks(assigned[name], others) for name in names))


def _is_expected_to_be_skipped(witness: str) -> bool:
    lines = (TESTS / "expected_skips.txt").read_text().splitlines()
    patterns = [line.partition("  #")[0].strip() for line in lines if not line.startswith("#")]
    return any(fnmatch(witness, pattern.partition("[")[0]) for pattern in patterns if pattern)
