"""Hosts and controllers that lose their power and come back; and links that are slow and lose packets.

One run: its controller's machine is off, another goes on with it from the same directory; then the machine of its
generator and verifier is off, and comes back.
"""

import json
import time
from pathlib import Path

import host_runs
import machines
import pytest
import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := machines.why_not()), reason=why or "they can be made"),
]
HOSTS = ("A", "B", "C")
STEPS = 70
"""So many that the run outlasts all that comes over it, on a fast machine too."""
SETTINGS = dict(
    training__steps=STEPS,
    sft__steps=5,
    parallelism__data_parallel_shard_degree=2,
    checkpoint__every=8,
    rollout__prompts_per_step=8,
    eval__prompts=8,
)
PLACED = dict(hosts__trainer="[0, 1]", hosts__generator="[2]", hosts__verifier="[2]")


def of_a_run(cluster: machines.Machines, name: str) -> dict[int, str]:
    """Processes of runs on a host, as seen from here, by the marks that they carry; fork servers are no run's."""
    found = {}
    for pid in cluster.processes(name):
        mark = running.mark_of(pid)
        if mark and mark != "0" * 32:
            found[pid] = mark
    return found


def samples(root: Path) -> dict:
    return json.loads((root / "summary.json").read_text())["samples"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults")
    with machines.Machines("ctl", "other", *HOSTS, folder=out) as cluster:
        run = host_runs.OverHosts(cluster, out, HOSTS, ("ctl", "other"))
        run.wait_until_hosts_listen()
        first = run.begin("ctl", **SETTINGS, **PLACED)
        run.wait_for_step(10)
        run.before = {name: of_a_run(cluster, name) for name in HOSTS}
        cluster.off("ctl")
        first.wait(10)
        run.trained_before = max(host_runs.losses(run.root))
        off = time.monotonic()
        run.begin("other", "--resume", **SETTINGS, **PLACED)
        run.wait_for_step(run.trained_before + 1)
        run.seconds_to_resume = time.monotonic() - off
        run.left_of_first = {name: set(of_a_run(cluster, name)) & set(run.before[name]) for name in HOSTS}
        cluster.off("C")
        off = time.time()
        run.wait_for(lambda: run.events("generator_serves") and run.events("verifier_serves"))
        run.seconds_to_serve = time.time() - off
        step = max(host_runs.losses(run.root))
        run.wait_for_step(step + 1)
        run.seconds_to_step = time.time() - off
        run.events_of_loss = [
            event
            for kind in ("died", "generator_serves", "verifier_serves", "started", "standby_waits")
            for event in run.events(kind)
            if event["time"] > off
        ]
        cluster.on("C")
        run.serve("C")
        back = time.time()
        run.wait_for(lambda: len(run.events("started", name="host 2 (C)")) == 3)
        run.seconds_to_join = time.time() - back
        run.code = run.controller.wait(host_runs.SECONDS)
        for host in run.hosts.values():
            if host.poll() is None:
                run.wait_for_idle = None
        deadline = time.monotonic() + 30
        while any(of_a_run(cluster, name) for name in HOSTS) and time.monotonic() < deadline:
            time.sleep(0.1)
        run.after = {name: of_a_run(cluster, name) for name in HOSTS}
        yield run


def test_it(run):
    print({key: getattr(run, key) for key in dir(run) if key.startswith("seconds")})
    print(run.said("other")[-6000:])
    for e in sorted(run.events_of_loss, key=lambda e: e["time"]):
        print(e)
    assert run.code == 0
    print(run.left_of_first, run.after)
    assert 0
