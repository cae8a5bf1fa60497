"""A private name that is gone is one error, which names the dependency, its version and the name."""

import re
import sys
import tomllib
from types import SimpleNamespace

import pytest
from tree import TREE

from titan_rl.compat.reach import MONARCH, PYTHON, TORCH, TORCHTITAN, VLLM, Dependency, DependencyChanged, Reach

PYTEST = Dependency("pytest", "9.*", ("no-such-distribution", "pytest"))


class Library:
    """What a dependency looks like."""

    annotated: int

    def __init__(self):
        self.set = 1

    def method(self):
        def inner(module):
            module.set_inside = 1

        return inner


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_library", SimpleNamespace(Library=Library))
    monkeypatch.setitem(sys.modules, "a_library.gone", None)


@pytest.mark.parametrize("path", ["method", "annotated", "set", "method.set_inside"])
def test_a_name_that_is_there_is_found(path):
    PYTEST.require([Reach(f"a_library:Library.{path}", "test")])


@pytest.mark.parametrize(
    "name", ["a_library:Library.gone", "a_library:Gone.method", "a_library.gone:name", "no_library:x"]
)
def test_a_name_that_is_gone_is_named(name):
    with pytest.raises(DependencyChanged) as error:
        PYTEST.require([Reach("a_library:Library.set", "test"), Reach(name, "count tokens")])
    dotted = name.replace(":", ".")
    line = f"pytest {pytest.__version__} has no {dotted}, which is used to count tokens: install pytest 9.*"
    assert str(error.value) == line


def test_a_module_that_cannot_be_imported_for_another_reason_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        PYTEST.require([Reach("broken_library:name", "test")])


def test_the_known_series_are_those_that_are_installed():
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
        *project["optional-dependencies"]["gpu"],
    ]
    pins = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in wanted)
    for dependency in (VLLM, TORCH, TORCHTITAN, MONARCH):
        assert {pins[name] for name in dependency.distributions} == {f"=={dependency.series}"}
    assert project["requires-python"] == PYTHON.series
