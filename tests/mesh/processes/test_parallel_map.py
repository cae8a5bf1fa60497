"""A function over many items by forked processes: order, errors, progress, and nothing left behind."""

import multiprocessing
import os
import signal

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.mesh.processes import parallel_map as module
from titan_rl.mesh.processes.parallel_map import parallel_map

ITEMS = list(range(2000))
HERE = os.getpid()


@pytest.fixture(autouse=True)
def several(monkeypatch):
    monkeypatch.setattr(module, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(module, "available_cores", lambda: 3)
    yield
    assert multiprocessing.active_children() == []


def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_results_come_in_order_from_all_processes():
    results = list(parallel_map(where, ITEMS, "counting"))
    assert [number for number, _ in results] == ITEMS
    assert len({pid for _, pid in results} - {HERE}) == 3


def test_few_items_are_done_here(monkeypatch):
    monkeypatch.setattr(module, "_ALONE_SECONDS", 60.0)
    assert {pid for _, pid in parallel_map(where, ITEMS, "counting")} == {HERE}
    assert list(parallel_map(where, [], "counting")) == []


def test_the_first_item_that_fails_is_told_and_none_behind_it_is_returned():
    def refuse(number: int) -> int:
        if number in (700, 900, 1900):
            raise ConfigError(f"row {number}")
        return number

    done = []
    with pytest.raises(ConfigError, match="row 700"):
        for number in parallel_map(refuse, ITEMS, "counting"):
            done.append(number)  # noqa: PERF402  # an extended list may lose what came before the error
    assert done == ITEMS[:700]


def test_a_killed_process_is_told():
    def end(number: int) -> None:
        if number == 1500 and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildProcessError, match="counting: a process was killed"):
        list(parallel_map(end, ITEMS, "counting"))


def test_a_process_that_hangs_is_told(monkeypatch):
    def hang(number: int) -> None:
        if number == 1500 and os.getpid() != HERE:
            signal.pause()

    monkeypatch.setattr(module, "_CHUNK_SECONDS", 3.0)
    with pytest.raises(ChildProcessError, match="counting: a process has been silent for 3 s"):
        list(parallel_map(hang, ITEMS, "counting"))


def test_who_takes_no_more_leaves_no_process():
    results = parallel_map(where, ITEMS, "counting")
    assert [next(results)[0] for _ in range(300)] == ITEMS[:300]
    assert multiprocessing.active_children()
    results.close()


def test_progress_is_told_on_stderr(monkeypatch, capfd):
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    list(parallel_map(where, ITEMS, "counting"))
    said = capfd.readouterr()
    assert "counting: 2,000 of 2,000, about 0 s left" in said.err and not said.out
