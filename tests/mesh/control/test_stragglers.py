"""Who is slow is found among its peers, and told once."""

import subprocess
import sys

from titan_rl.mesh.telemetry.stragglers import Stragglers


def noted(**seconds: float) -> Stragglers:
    stragglers = Stragglers()
    for _ in range(8):
        stragglers.note("trainer", {name.replace("_", " "): value for name, value in seconds.items()})
    return stragglers


def test_the_slow_one_is_told_once():
    stragglers = noted(rank_0=0.1, rank_1=0.1, rank_2=0.3)
    assert stragglers.slowest()["slowest_trainer"] == 0.3 / 0.1
    assert list(stragglers.new()) == ["rank 2"] and stragglers.new() == {}


def test_of_two_the_other_is_the_measure():
    assert noted(rank_0=0.1, rank_1=0.2).ratios() == {"rank 0": 0.5, "rank 1": 2.0}


def test_nobody_is_slow_alone_or_by_noise_or_too_early():
    assert noted(rank_0=9.0).slowest() == {}
    assert noted(rank_0=0.0001, rank_1=0.004).new() == {}
    stragglers = Stragglers()
    stragglers.note("trainer", {"rank 0": 1.0, "rank 1": 5.0})
    assert stragglers.ratios() == {}


def test_one_slow_step_does_not_make_a_straggler():
    stragglers = noted(rank_0=0.1, rank_1=0.1)
    stragglers.note("trainer", {"rank 0": 0.1, "rank 1": 5.0})
    assert stragglers.new() == {}


def test_work_is_judged_by_the_piece():
    """Of what was done last, the whole is told."""
    stragglers = Stragglers()
    for _ in range(8):
        stragglers.note("generator", {"generator 0": 4.0, "generator 1": 1.0}, {"generator 0": 4, "generator 1": 1})
        stragglers.note("trainer", {"trainer rank 0": 2.0})
    assert set(stragglers.ratios().values()) == {1.0}
    assert stragglers.of_last_step == {"generator 0": 4.0, "generator 1": 1.0, "trainer rank 0": 2.0}


def test_who_was_replaced_begins_anew():
    stragglers = noted(rank_0=0.1, rank_1=0.9)
    stragglers.note("trainer", {"rank 0": 0.1})
    assert stragglers.ratios() == {}


ONE_THREAD = """
import time

from titan_rl.mesh.telemetry.stragglers import runnable_seconds

began, runnable = time.monotonic(), runnable_seconds()
time.sleep(0.3)
assert runnable_seconds() - runnable < time.monotonic() - began - 0.25
ran, runnable = time.process_time(), runnable_seconds()
while time.process_time() < ran + 0.2:
    pass
assert runnable_seconds() - runnable > 0.15
"""


def test_work_counts_and_waiting_for_others_does_not():
    """In a process with no other threads, where sleeping is the time that is left, on a loaded machine too."""
    subprocess.run([sys.executable, "-c", ONE_THREAD], check=True, timeout=60)
