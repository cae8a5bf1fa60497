"""Guarantees of docs/concepts/guarantees.md: each has tests in ``.ci/run``, by the table of tests/README.md."""

import re

import pytest
from tree import TREE
from witnesses import TESTS, is_run_by_ci, rows_of, section, witnesses_of

GUARANTEE = re.compile(r"^\* \*\*(.+?)[.,]?\*\*", re.MULTILINE)


def table() -> dict[str, list[str]]:
    """Witnesses of each guarantee: node ids below tests/."""
    rows = rows_of(section((TESTS / "README.md").read_text(), "Which test shows which guarantee"))
    return {guarantee: witnesses_of(witnesses) for guarantee, witnesses in rows}


def test_every_guarantee_has_a_row():
    page = (TREE / "docs" / "concepts" / "guarantees.md").read_text()
    assert GUARANTEE.findall(section(page, "What holds")) == list(table())


@pytest.mark.parametrize(("guarantee", "witnesses"), table().items(), ids=lambda value: str(value)[:40])
def test_its_witnesses_are_run_by_ci(guarantee, witnesses):
    assert witnesses and all(is_run_by_ci(witness) for witness in witnesses)
