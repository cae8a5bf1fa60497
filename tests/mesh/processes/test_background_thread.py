"""Threads beside the one that computes start no threads of their own."""

import asyncio
import os
import threading

import pytest
import torch

from titan_rl.mesh.resources.background_thread import compute_alone, in_side_thread


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def started_by(work) -> int:
    """How many threads ``work`` starts, in a thread of its own."""
    found: list[int] = []

    def run() -> None:
        before = threads()
        work()
        found.append(len(threads() - before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def fill() -> None:
    torch.ones(2**20)


def test_an_operator_starts_a_thread_unless_it_is_told_not_to():
    assert started_by(fill) == 1
    assert started_by(lambda: (compute_alone(), fill())) == 0


def test_other_threads_go_on_computing_together():
    assert started_by(compute_alone) == 0
    assert torch.get_num_threads() == 2
    assert asyncio.run(in_side_thread(torch.get_num_threads)) == 1
    assert started_by(fill) == 1


def test_errors_are_the_caller_s():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_side_thread(lambda denominator: 1 / denominator, 0))
