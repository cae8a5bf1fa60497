"""Distribution of test files over pytest-xdist workers: the longest first, waiting tests on a worker of their own.

Each worker but the last is pinned to its share of the cores. The last one is pinned to nothing and runs the tests that
are marked ``waits``, which leave a core idle for most of their time. Where a worker has another Python than the rest
(``--tx popen//python=...``), it runs every test that starts no actors, and others when these are done. What a file
takes is read from ``tests/durations.json``, which ``--record-durations`` writes anew.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

DURATIONS = Path(__file__).parents[2] / "durations.json"
MAX_PINNED = 8
_LISTED_SECONDS = 1.0
"""Tests that take less are listed together, by file."""


class Kind(StrEnum):
    """What a test needs of a worker."""

    FAST = "fast"
    SLOW = "slow"
    WAITS = "waits"


def kind_of(item: pytest.Item) -> Kind:
    """Kind of a test, by its marks."""
    marks = {mark.name for mark in item.iter_markers()}
    return Kind.WAITS if "waits" in marks else Kind.SLOW if marks & {"slow", "confirms"} else Kind.FAST


def num_workers() -> int:
    """Pinned workers, and the one for waiting tests."""
    return min(len(os.sched_getaffinity(0)), MAX_PINNED) + 1


def cores_of_worker(worker: int, num_workers: int) -> list[int]:
    """Share of this process's cores; all of them for the last of several workers, or where cores are too few."""
    cores, num_pinned = sorted(os.sched_getaffinity(0)), num_workers - 1
    return cores[worker::num_pinned] if worker < num_pinned <= len(cores) else cores


def name_in_tests(node_id: str) -> str:
    """Node id below tests/."""
    return node_id.removeprefix("tests/")


def file_of(node_id: str) -> str:
    """File of a test, from its node id."""
    return node_id.partition("::")[0]


def expected_seconds(node_ids: Iterable[str], durations: dict[str, float]) -> dict[str, float]:
    """Seconds of each file's tests: those that are listed by themselves, and the file's entry for its others."""
    seconds: dict[str, float] = defaultdict(float)
    for node_id in node_ids:
        seconds[file_of(node_id)] += durations.get(name_in_tests(node_id), 0.0)
    return {file: taken + durations.get(name_in_tests(file), 0.0) for file, taken in seconds.items()}


def _kinds_file(worker_input: dict) -> Path:
    return Path(tempfile.gettempdir()) / f"kinds_{worker_input['testrunuid']}_{worker_input['workerid']}.json"


def longest_first(items: list[pytest.Item], worker_input: dict) -> None:
    """Order of a worker's items, in place, by the seconds of their files; tells the scheduler each test's kind."""
    durations = json.loads(DURATIONS.read_text())
    seconds = expected_seconds([item.nodeid for item in items], durations)
    items.sort(key=lambda item: -seconds[file_of(item.nodeid)])
    _kinds_file(worker_input).write_text(json.dumps({item.nodeid: kind_of(item) for item in items}))


def keep_own_search_path(node: WorkerController) -> None:
    """A worker with another Python is not given the controller's ``sys.path``, which names the wrong standard library.

    xdist gives it to those that it knows as ``popen``, as it sets them up.
    """
    if node.gateway.spec.python:
        node.gateway.spec.popen = None


def forget_search_path_of_xdist() -> None:
    """``PYTHONPATH`` as it was before xdist put the current folder first, for what a worker starts."""
    if (path := os.environ.get("PYTHONPATH", "")).startswith(own := f"{Path.cwd()}{os.pathsep}"):
        os.environ["PYTHONPATH"] = path.removeprefix(own)
        if not os.environ["PYTHONPATH"]:
            del os.environ["PYTHONPATH"]


class LongestFirst(LoadFileScheduling):
    """Files in the order of their collection, the tests of one kind together, to workers of that kind."""

    def __init__(self, config: pytest.Config, log=None):
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._kinds: dict[str, str] = {}

    def add_node_collection(self, node: WorkerController, collection) -> None:
        file = _kinds_file(node.workerinput)
        self._kinds = self._kinds or json.loads(file.read_text())
        file.unlink()
        super().add_node_collection(node, collection)

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker that has ended or died, and hand on what it had not run.

        xdist would hand on its finished files as well, and wait forever for a worker that was given nothing else."""
        files = self.assigned_work[node]
        self.assigned_work[node] = {scope: tests for scope, tests in files.items() if not all(tests.values())}
        return super().remove_node(node)

    def _split_scope(self, nodeid: str) -> str:
        return f"{self._kinds[nodeid]} {file_of(nodeid)}"

    def _kinds_for(self, node: WorkerController) -> list[Kind]:
        """What a worker runs, in this order."""
        if self.numnodes > 1 and node.gateway.id == f"gw{self.numnodes - 1}":
            return [Kind.WAITS]
        pythons = {spec.python for spec in (other.gateway.spec for other in self.nodes)}
        if len(pythons) == 1:
            return [Kind.SLOW, Kind.FAST, Kind.WAITS]
        return [Kind.FAST, Kind.SLOW, Kind.WAITS] if node.gateway.spec.python else [Kind.SLOW, Kind.WAITS]

    def _next_scope(self, node: WorkerController) -> str | None:
        for kind in self._kinds_for(node):
            for scope in self.workqueue:
                if scope.startswith(kind):
                    return scope
        return None

    def _assign_work_unit(self, node: WorkerController) -> None:
        if (scope := self._next_scope(node)) is not None:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self._next_scope(node) is not None:
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()


class Durations:
    """Plugin of the session that hears of all tests: sums up what each took and writes it down."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[name_in_tests(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        listed = {name: taken for name, taken in self._seconds.items() if taken >= _LISTED_SECONDS}
        for name in self._seconds.keys() - listed.keys():
            listed[file_of(name)] = listed.get(file_of(name), 0.0) + self._seconds[name]
        rounded = {name: round(taken, 1) for name, taken in sorted(listed.items())}
        DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n")
