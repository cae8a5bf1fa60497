"""Threads beside the one that computes start no threads of their own."""

import asyncio
import os
import threading

import pytest
import torch

from titan_rl.mesh.side_thread import compute_alone, in_side_thread


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def of_a_thread(work) -> int:
    """How many threads there are more, at the end of ``work``, than the one that it is called in."""
    found: list[int] = []

    def run() -> None:
        work()
        found.append(num_threads())

    before, thread = num_threads(), threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] - before - 1


def fill() -> None:
    torch.ones(2**20)


def test_an_operator_starts_a_thread_unless_it_is_told_not_to():
    assert of_a_thread(fill) == 1
    assert of_a_thread(lambda: (compute_alone(), fill())) == 0


def test_other_threads_go_on_computing_together():
    assert of_a_thread(compute_alone) == 0
    assert torch.get_num_threads() == 2
    assert asyncio.run(in_side_thread(torch.get_num_threads)) == 1
    assert of_a_thread(fill) == 1


def test_errors_are_the_caller_s():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_side_thread(lambda denominator: 1 / denominator, 0))
