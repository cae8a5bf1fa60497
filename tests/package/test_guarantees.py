"""Guarantees of the architecture page: each has tests in ``.ci/run`` that show it, by the table of tests/README.md."""

import ast
import re

import pytest
from tree import TREE

TESTS = TREE / "tests"
GUARANTEE = re.compile(r"^\* \*\*(.+?)[.,]?\*\*", re.MULTILINE)


def section(page: str, heading: str) -> str:
    """Text below a heading, up to the next one of its level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table() -> dict[str, list[str]]:
    """Witnesses of each guarantee: node ids below tests/."""
    rows = section((TESTS / "README.md").read_text(), "Which test shows which guarantee").splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    return {guarantee: re.findall("`([^`]+)`", witnesses) for guarantee, witnesses in cells[2:]}


def marks_of(node: ast.AST) -> set[str]:
    """Names of pytest's marks in an expression."""
    return {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def is_run_by_ci(witness: str) -> bool:
    """Whether the test, or some test of the file, is there and does not merely confirm."""
    file, _, name = witness.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    if any("confirms" in marks_of(mark) for mark in marks):
        return False
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = [test for test in tests if test.name == name or (not name and test.name.startswith("test_"))]
    return any("confirms" not in ast.dump(ast.Tuple(test.decorator_list)) for test in named)


def test_every_guarantee_has_a_row():
    page = (TREE / "docs" / "architecture.md").read_text()
    assert GUARANTEE.findall(section(page, "What holds")) == list(table())


@pytest.mark.parametrize(("guarantee", "witnesses"), table().items(), ids=lambda value: str(value)[:40])
def test_its_witnesses_are_run_by_ci(guarantee, witnesses):
    assert witnesses and all(is_run_by_ci(witness) for witness in witnesses)
