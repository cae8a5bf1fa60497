"""The guard itself: which worker runs which tests, and that a skip nobody expects fails a session."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import scheduling
import skips
import tree
from tree import SUPPORT, TREE


class FakeNode:
    """A worker that notes what it is told to run."""

    def __init__(self, number: int, python: str | None):
        spec = SimpleNamespace(python=python, popen=True)
        self.gateway = SimpleNamespace(id=f"gw{number}", spec=spec)
        self.workerinput = dict(testrunuid="guard", workerid=f"gw{number}")
        self.shutting_down, self.given = False, []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def add(scheduler, node: FakeNode, kinds: dict[str, str]) -> None:
    """Have a worker take part that has collected these tests."""
    scheduling._kinds_file(node.workerinput).write_text(json.dumps(kinds))
    scheduler.add_node(node)
    scheduler.add_node_collection(node, list(kinds))


def scheduled(pythons: list[str | None], kinds: dict[str, str], tmp_path, monkeypatch):
    """A scheduler that has given out its first files, and workers with these Pythons, the last for waiting tests."""
    monkeypatch.setattr(scheduling.tempfile, "gettempdir", lambda: str(tmp_path))
    log = SimpleNamespace(loadscopesched=print, loadfilesched=lambda *_: None)
    options = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(getvalue=lambda name: ["popen"] * len(pythons), option=options)
    scheduler = scheduling.LongestFirst(config, log)
    nodes = [FakeNode(number, python) for number, python in enumerate(pythons)]
    for node in nodes:
        add(scheduler, node, kinds)
    scheduler.schedule()
    return scheduler, nodes


def run_all(scheduler, nodes: list[FakeNode], names: list[str], rounds: int = 1_000) -> dict[str, str]:
    """Which worker ran each test, when all run at one pace and stop after so many tests each."""
    ran = {}
    for node in [node for _ in range(rounds) for node in nodes]:
        if node.given:
            index = node.given.pop(0)
            ran[names[index]] = node.gateway.id
            scheduler.mark_test_complete(node, index)
    return ran


def made_kinds() -> dict[str, str]:
    """Tests of eight files, six of each."""
    return {
        f"tests/{kind}/test_{file}.py::test_{number}": kind
        for file in range(8)
        for kind in ("slow", "fast", "waits")
        for number in range(6)
    }


def test_waiting_tests_run_beside_the_others_and_all_tests_run(tmp_path, monkeypatch):
    kinds = made_kinds()
    scheduler, nodes = scheduled([None, None, None], kinds, tmp_path, monkeypatch)
    ran = run_all(scheduler, nodes, list(kinds))
    assert ran.keys() == kinds.keys() and all(node.shutting_down for node in nodes)
    assert {kinds[name] for name, worker in ran.items() if worker == "gw2"} == {"waits"}
    assert len({worker for worker in ran.values()}) == 3


def test_what_a_dead_worker_had_not_run_is_run_by_others(tmp_path, monkeypatch):
    kinds = made_kinds()
    scheduler, nodes = scheduled([None, None, None], kinds, tmp_path, monkeypatch)
    ran = run_all(scheduler, nodes, list(kinds), rounds=20)
    assert kinds.keys() - ran.keys() > {scheduler.remove_node(nodes[0])}, "three files are done, the fourth is not"
    replacement = FakeNode(3, None)
    add(scheduler, replacement, kinds)
    scheduler.schedule()
    rest = run_all(scheduler, [*nodes[1:], replacement], list(kinds))
    assert rest.keys() == kinds.keys() - ran.keys() and "gw3" in rest.values()
    assert all(node.shutting_down for node in [*nodes[1:], replacement])


def test_every_fast_test_runs_on_the_other_python(tmp_path, monkeypatch):
    kinds = made_kinds()
    scheduler, nodes = scheduled([None, "/usr/bin/python3.11", None], kinds, tmp_path, monkeypatch)
    ran = run_all(scheduler, nodes, list(kinds))
    assert ran.keys() == kinds.keys()
    assert {worker for name, worker in ran.items() if kinds[name] == "fast"} == {"gw1"}


def test_a_run_without_waiting_tests_ends(tmp_path, monkeypatch):
    kinds = {name: kind for name, kind in made_kinds().items() if kind == "fast"}
    scheduler, nodes = scheduled([None, None, None], kinds, tmp_path, monkeypatch)
    assert run_all(scheduler, nodes, list(kinds)).keys() == kinds.keys() and nodes[2].shutting_down


def test_the_committed_durations_are_read_and_are_of_files_that_are_there():
    """Without them the slowest files come last, and one worker runs them alone."""
    files = {name.partition("::")[0] for name in json.loads(scheduling.DURATIONS.read_text())}
    assert len(files) > 50 and all((TREE / "tests" / file).is_file() for file in files)


def test_files_that_tests_name_are_there():
    """Those of tests that seldom run, too: ``EXAMPLES / "my_loss.toml"``."""
    named = re.compile(r'\b(CONFIGS|EXAMPLES|PACKAGE|SCRIPTS|TREE)((?: / "[^"*]+")+)')
    paths = {
        (file.name, getattr(tree, folder).joinpath(*re.findall(r'"(.+?)"', parts)))
        for file in (TREE / "tests").rglob("*.py")
        for folder, parts in named.findall(file.read_text())
    }
    assert len(paths) > 30
    assert not [(name, path) for name, path in paths if not path.exists()]


def test_files_are_expected_to_take_what_their_tests_took():
    durations = {"a/test_x.py": 2.0, "a/test_x.py::test_long": 5.0, "b/test_y.py::test_z": 1.5}
    ids = ["tests/a/test_x.py::test_long", "tests/a/test_x.py::test_short", "tests/c/test_new.py::test_w"]
    assert scheduling.expected_seconds(ids, durations) == {"tests/a/test_x.py": 7.0, "tests/c/test_new.py": 0.0}


def test_pinned_workers_share_the_cores_and_the_last_has_all(monkeypatch):
    monkeypatch.setattr(scheduling.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert [scheduling.cores_of_worker(worker, 3) for worker in range(3)] == [[0, 2], [1, 3], [0, 1, 2, 3]]
    assert scheduling.cores_of_worker(0, 1) == [0, 1, 2, 3]


TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("case", ["a", "b"])
def test_skips(case):
    pytest.skip("nothing here")
"""
SESSION = "import pathlib, pytest, skips, sys; sys.exit(pytest.main({}, [skips.ExpectedSkips(pathlib.Path({!r}))]))"


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_skip_that_is_not_expected_fails_the_session(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(TESTS)
    expected = tmp_path / "expected.txt"
    options = ["-q", "-p", "no:cacheprovider", *workers, "test_it.py"]
    ended = {}
    for text in ("test_it.py::test_skips[a]  # a reason\n", "test_it.py::test_skips[*  # a reason\n"):
        expected.write_text(text)
        command = [sys.executable, "-c", SESSION.format(options, str(expected))]
        environment = {"PYTHONPATH": str(SUPPORT / "session"), "PATH": "/usr/bin:/bin"}
        ended[text] = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, second = ended.values()
    assert first.returncode == 1 and "UNEXPECTED SKIP test_it.py::test_skips[b]: " in first.stdout, first
    assert "test_skips[a]:" not in first.stdout and "nothing here" in first.stdout
    assert second.returncode == 0 and "UNEXPECTED" not in second.stdout, second


DIES = """
import os

def test_fails():
    assert 1 == 2

def test_dies():
    os._exit(1)

def test_passes():
    pass
"""


def test_a_failure_and_a_dead_worker_are_told_at_once(tmp_path):
    (tmp_path / "test_it.py").write_text(DIES)
    options = ["-q", "-p", "no:cacheprovider", "-n", "1", "--no-summary", "test_it.py"]
    program = f"import failures, pytest, sys; sys.exit(pytest.main({options}, [failures.FailuresAtOnce()]))"
    environment = {"PYTHONPATH": f"{SUPPORT / 'session'}", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended
    assert "FAILED test_it.py::test_fails (call): assert 1 == 2" in ended.stdout, ended.stdout
    assert "worker 'gw0' crashed while running 'test_it.py::test_dies'" in ended.stdout, ended.stdout


def test_what_may_be_skipped_is_there():
    """A pattern for a test that is gone would let another one hide behind it."""
    for pattern in skips.expected_patterns((TREE / "tests" / "expected_skips.txt").read_text()):
        file, _, name = pattern.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TREE / "tests" / file).read_text(), pattern
