"""Hosts and controllers that lose their power and come back; and links that are slow and lose packets.

One run: its controller's machine is off, and another goes on with it from the same directory. Then the machine of its
generator and verifier is off, and comes back; then that of a trainer rank.
"""

import json
import statistics
import time
from pathlib import Path

import host_runs
import machines
import pytest
import running

from titan_rl.records.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := machines.why_not()), reason=why or "they can be made"),
]
HOSTS = ("A", "B", "C")
STEPS = 120
"""So many that the run outlasts all that comes over it, on a fast machine too."""
WHOLE_AGAIN = 120.0
"""Seconds that it may take where other tests run beside. By itself it takes less than 30, as is printed (``-s``), of
which the default silence of a host is 18: docs/benchmarks.md has the figures."""
SETTINGS = dict(
    training__steps=STEPS,
    sft__steps=5,
    parallelism__data_parallel_shard_degree=2,
    checkpoint__every=8,
    rollout__prompts_per_step=8,
    eval__prompts=8,
)
PLACED = dict(hosts__trainer="[0, 1]", hosts__generator="[2]", hosts__verifier="[2]")


def samples(root: Path) -> dict:
    return json.loads((root / "summary.json").read_text())["samples"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults")
    # a process has one thread then, as in the run on one core: on some CPUs MKL's sums depend on how many there are
    with machines.Machines("ctl", "other", *HOSTS, folder=out, one_core_each=True) as cluster:
        run = host_runs.OverHosts(cluster, out, HOSTS, ("ctl", "other"))
        run.wait_until_hosts_listen()
        run.seconds = {}
        _lose_controller(run)
        _lose_generator(run)
        _lose_trainer_rank(run)
        run.code = run.controller.wait(host_runs.SECONDS)
        run.wait_until_idle("A", "C")
        print({fault: round(seconds, 1) for fault, seconds in run.seconds.items()})
        yield run


def _lose_controller(run: host_runs.OverHosts) -> None:
    first = run.begin("ctl", **SETTINGS, **PLACED)
    run.wait_for_step(10)
    before = {name: host_runs.of_runs(run.cluster, name) for name in HOSTS}
    off = time.monotonic()
    run.cluster.off("ctl")
    first.wait(10)
    step = max(host_runs.losses(run.root))
    run.begin("other", "--resume", **SETTINGS, **PLACED)
    run.wait_for_step(step + 1)
    run.seconds["controller"] = time.monotonic() - off
    run.left = {name: host_runs.of_runs(run.cluster, name) & before[name] for name in HOSTS}


def _whole_after(run: host_runs.OverHosts, fault: str, count: int) -> None:
    """The generator has been brought back so often, and a step was done since."""
    off = time.monotonic()
    run.wait_for(lambda: len(run.events("generator_serves")) == count)
    run.wait_for_step(max(host_runs.losses(run.root)) + 1)
    run.seconds[fault] = time.monotonic() - off


def _lose_generator(run: host_runs.OverHosts) -> None:
    run.cluster.off("C")
    _whole_after(run, "generator and verifier", 1)
    run.cluster.on("C")
    run.serve("C")
    run.seconds["booted, joined"] = run.wait_for(lambda: len(run.events("started", name="host 2 (C)")) == 3)


def _lose_trainer_rank(run: host_runs.OverHosts) -> None:
    """The generator is there, too, by now: it goes to its own host again."""
    run.cluster.off("B")
    _whole_after(run, "trainer rank and generator", 2)


def test_all_steps_are_done(run):
    assert run.code == 0, run.said("other")[-3000:]
    assert sorted(host_runs.losses(run.root)) == list(range(1, STEPS + 1))
    assert {event["name"] for event in run.events("died")} >= {"host 1 (B)", "host 2 (C)"}, "the faults have happened"


def test_nothing_is_lost_or_trained_twice_and_all_is_as_on_one_host(run, tmp_path):
    assert running.train(tmp_path / "one", on_one_core=True, **SETTINGS) == 0, running.output(tmp_path / "one")[-3000:]
    assert host_runs.losses(run.root) == host_runs.losses(tmp_path / "one"), "bit for bit, also what was done again"
    assert samples(run.root) == samples(tmp_path / "one")


def test_a_run_is_whole_again_soon(run):
    assert all(seconds <= WHOLE_AGAIN for seconds in run.seconds.values()), run.seconds


def test_when_the_new_controller_goes_on_the_old_one_s_processes_are_gone(run):
    assert run.left == {name: set() for name in HOSTS}


def test_a_host_that_has_booted_anew_gets_work_in_the_same_run(run):
    hosts = [event["host"] for event in run.events("started", name="generator 0")]
    assert hosts[-1] == "host 2 (C)" != hosts[-2], hosts


def test_a_slow_link_that_loses_packets_costs_time_and_nothing_else(tmp_path):
    settings = SETTINGS | dict(training__steps=6)
    link = machines.Link(delay=0.05, loss=0.01)
    with machines.Machines("ctl", *HOSTS, folder=tmp_path, link=link) as cluster:
        run = host_runs.OverHosts(cluster, tmp_path, HOSTS, ("ctl",))
        run.wait_until_hosts_listen()
        code = run.begin("ctl", **settings, **PLACED).wait(2 * host_runs.SECONDS)
        assert code == 0, run.said("ctl")[-3000:]
        assert not run.events("died"), "nothing is taken for dead"
        assert sorted(host_runs.losses(run.root)) == list(range(1, 7))
        seconds = [row["seconds_step"] for row in read_metrics(run.root) if "seconds_step" in row]
        print(f"a step over such links takes {statistics.median(seconds):.1f} s")
