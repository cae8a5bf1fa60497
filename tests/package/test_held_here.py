"""Reports of other systems on the page "Held here": each names one test that ``.ci/run`` runs."""

import re

import pytest
from tree import TREE
from witnesses import is_run_by_ci, rows_of, witnesses_of

PAGE = (TREE / "docs" / "concepts" / "held_here.md").read_text()
ROWS = rows_of(PAGE)
REPOSITORY = re.compile(r"([\w -]+?)\s\(`[\w.-]+/[\w.-]+`\)")


def reports_of(cell: str) -> list[tuple[str, int]]:
    """System and number of each; a number without a system is of the one before."""
    found, system = [], ""
    for part in cell.split(", "):
        name, _, number = part.rpartition("#")
        system = name.strip() or system
        found.append((system, int(number)))
    return found


def test_there_are_fifty_rows_and_no_report_is_there_twice():
    reports = [report for row in ROWS for report in reports_of(row[0])]
    assert len(ROWS) >= 50 and len(set(reports)) == len(reports)
    assert len({row[1] for row in ROWS}) == len(ROWS)


def test_every_system_has_its_repository():
    named = {name.strip(" ,:\n") for name in REPOSITORY.findall(PAGE.partition("\n## ")[0].partition("are found:")[2])}
    assert {system for row in ROWS for system, _ in reports_of(row[0])} == named


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_test_is_run_by_ci(row):
    report, fault, witness = row
    [name] = witnesses_of(witness)
    assert "::" in name and is_run_by_ci(name)
    assert 20 < len(fault) <= 120 and len(report) <= 120
