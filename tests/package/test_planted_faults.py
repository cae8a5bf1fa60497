"""The planted faults fit this tree: where each belongs is found, and the tests that name it are there."""

import ast

import planted_faults
import pytest
from planted_faults import FAULTS, Fault, copy_tree, failures, plant
from tree import TREE

FIRST = FAULTS[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_its_place_and_its_witnesses(fault):
    text = (TREE / fault.file).read_text()
    assert text.count(fault.anchor) == 1, f"{fault.anchor!r} is to be exactly once in {fault.file}"
    ast.parse(text.replace(fault.anchor, fault.wrong))
    assert fault.witnesses and fault.wrong != fault.anchor
    for witness in fault.witnesses:
        file, _, name = witness.partition("::")
        functions = [node for node in ast.parse((TREE / "tests" / file).read_text()).body if hasattr(node, "name")]
        assert name in {function.name for function in functions}, witness


def test_names_are_told_apart_and_the_page_has_them_all():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 14
    page = (TREE / "tests" / "README.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| `") and line.split("`")[1] in names]
    assert rows == [fault.row() for fault in FAULTS], "python tests/planted_faults.py --list prints them"


def test_a_fault_is_planted_once_and_links_stay_links(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    assert (tree / "titan_rl" / "actors").is_symlink() and (tree / "titan_rl" / "actors" / "trainer.py").is_file()
    plant(FIRST, tree)
    assert FIRST.wrong in (tree / FIRST.file).read_text() and FIRST.wrong not in (TREE / FIRST.file).read_text()
    with pytest.raises(ValueError, match=f"{FIRST.name}: .* is 0 times"):
        plant(FIRST, tree)


ADDS = "def add(a, b):\n    return a + b\n"
TESTS = """
from titan_rl import add

def test_it():
    assert add(2, 2) == 4

def test_more():
    assert add(2, 3) == {right}
"""


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A package of the name, with a module and its tests; the second test fails unless it is told otherwise."""

    def make(right: int = 5):
        tests = TESTS.format(right=right)
        for name, text in (("titan_rl/__init__.py", ADDS), ("tests/test_it.py", tests), ("pyproject.toml", "")):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(planted_faults, "TREE", tmp_path)
        monkeypatch.setattr(planted_faults, "COPIED", ("titan_rl", "tests", "pyproject.toml"))

    return make


def fault(wrong: str, *witnesses: str) -> Fault:
    return Fault(
        "wrong", "it adds", "titan_rl/__init__.py", "a + b", wrong, tuple(f"test_it.py::{name}" for name in witnesses)
    )


@pytest.mark.parametrize(
    ("wrong", "witnesses", "is_seen"),
    [("a - b", ["test_it"], True), ("a * b", ["test_it"], False), ("a * b", ["test_it", "test_more"], False)],
)
def test_a_fault_is_seen_if_all_its_witnesses_fail(small_tree, capsys, wrong, witnesses, is_seen):
    small_tree()
    assert planted_faults.check([fault(wrong, *witnesses)]) is is_seen
    said = capsys.readouterr().out
    assert ("wrong: named" if is_seen else "wrong: NOT SEEN") in said
    assert "assert 0 == 4" in said or not is_seen


def test_a_witness_that_fails_anyway_is_told(small_tree, capsys):
    small_tree(right=6)
    assert planted_faults.check([fault("a - b", "test_more")]) is False
    assert "test_it.py::test_more fails without any fault: assert 5 == 6" in capsys.readouterr().out


def test_a_witness_that_is_not_there_is_an_error(small_tree):
    small_tree()
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        failures(planted_faults.TREE, ["test_it.py::test_gone"])
