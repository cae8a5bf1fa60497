"""``titan-rl launch slurm`` on a real Slurm: its controller's node has no power, or is drained."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import machines
import pytest
import running
import slurm_cluster
from tree import CONFIGS

from titan_rl.records.ledger.audit import flaws
from titan_rl.records.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.waits,
    pytest.mark.skipif(bool(why := slurm_cluster.why_not()), reason=why or "it can be had"),
]
NODES = ("A", "B", "C", "D")
STEPS = 20
_SECONDS = 400.0
_OF_THE_NODE = ("slurmd", "sleep ", "unshare ", "nsenter ")
CONFIG = CONFIGS / "quickstart.toml"
SETTINGS = {
    "training.steps": STEPS,
    "sft.steps": 3,
    "rollout.prompts_per_step": 8,
    "eval.prompts": 16,
    "checkpoint.every": 4,
    "hosts.trainer": "[0]",
    "hosts.generator": "[1]",
    "hosts.silence": 8.0,
}


class Launched:
    """A run, and what is done to it."""

    def __init__(self, slurm: slurm_cluster.Slurm, cluster: machines.Machines, out: Path):
        self.slurm, self.cluster, self.root, self.folder = slurm, cluster, out / "run", out / "launch"
        asked = [f"--{key}={value}" for key, value in SETTINGS.items()]
        command = [sys.executable, "-m", "titan_rl.cli", "launch", "slurm", str(CONFIG), "--nodes", "2", *asked]
        said = slurm.run(*command, "--folder", str(self.folder), f"--run.dir={self.root}")
        assert "submitted as Slurm job" in said
        self.job = said.split("Slurm job ")[1].split(":")[0]

    def drain(self) -> None:
        """Its node, and have the job requeued."""
        node = self._wait_for_steps()
        self.slurm.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        self.slurm.run("scontrol", "requeue", self.job)
        self._wait_for_requeue()

    def cut_power(self) -> None:
        """Of the node that it is on now."""
        self.cluster.off(self._wait_for_steps())
        self._wait_for_requeue()

    def _wait_for_steps(self) -> str:
        """The first ones; returns the node of the controller."""
        self.wait(lambda: 5 in self.steps(), "step 5")
        self.hosts_before, self.first_node = self.hosts(), self.node()
        return self.first_node

    def _wait_for_requeue(self) -> None:
        self.wait(lambda: self.state() == "PENDING", "the requeue")
        self.steps_before = self.steps()
        self.slurm.run("scontrol", "update", f"jobid={self.job}", "StartTime=now")  # Slurm lets two minutes pass

    def finish(self) -> None:
        self.wait(lambda: self.state() in ("COMPLETED", "CANCELLED"), "the end of the job")
        self.end, self.last_node = self.state(), self.node()

    def steps(self) -> set[int]:
        if not (self.root / "metrics.jsonl").exists():
            return set()
        return {row["step"] for row in read_metrics(self.root) if "loss" in row}

    def state(self) -> str:
        return self.slurm.jobs().get(self.job, ("", "gone", ""))[1]

    def node(self) -> str:
        return self.slurm.jobs()[self.job][2]

    def hosts(self) -> dict[str, str]:
        """Of each host's job that runs: its node."""
        jobs = self.slurm.jobs().items()
        return {job: node for job, (name, state, node) in jobs if "-host" in name and state == "RUNNING"}

    def wait(self, is_so, what: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not is_so():
            assert time.monotonic() < deadline and self.state() != "FAILED", f"{what}: {self.output()}"
            time.sleep(0.2)

    def output(self) -> str:
        told = [path.read_text()[-2500:] for path in self.folder.glob("*.out")]
        return "\n".join([str(self.slurm.jobs()), self.slurm.log()[-1500:], *told])

    def events(self, kind: str) -> list[dict]:
        lines = (self.root / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


def programs(cluster: machines.Machines, node: str) -> list[str]:
    """What runs on a node besides Slurm's own daemon and what makes the host."""
    lines = [running.command_line(pid) for pid in cluster.processes(node)]
    return [line for line in lines if line and not line.startswith(_OF_THE_NODE)]


@contextmanager
def requeued(out: Path, fault: Callable[[Launched], None]) -> Iterator[Launched]:
    """A run whose job is requeued after a fault of its controller's node, at its end."""
    with machines.Machines("ctl", *NODES, folder=out) as cluster:
        launched = Launched(slurm_cluster.Slurm(cluster, "ctl", NODES), cluster, out)
        fault(launched)
        launched.finish()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(programs(cluster, node) for node in NODES):
            time.sleep(0.2)
        launched.left = {node: programs(cluster, node) for node in NODES}
        yield launched


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    with requeued(tmp_path_factory.mktemp("slurm"), Launched.cut_power) as launched:
        yield launched


def test_a_requeued_job_ends_its_run(launched):
    assert launched.end == "COMPLETED", launched.output()
    assert launched.steps() == set(range(1, STEPS + 1))
    assert 5 <= max(launched.steps_before) < STEPS, "in the middle"
    assert launched.first_node != launched.last_node


@pytest.mark.confirms
def test_so_does_one_whose_node_is_drained(tmp_path):
    with requeued(tmp_path, Launched.drain) as drained:
        test_a_requeued_job_ends_its_run(drained)
        test_it_resumed_and_did_not_begin_another(drained)
        test_nothing_is_lost_and_nothing_is_trained_twice(drained)


def test_it_resumed_and_did_not_begin_another(launched):
    [resumed] = launched.events("resumed")
    assert resumed["step"] >= 5, "whatever the ledger knew as trained"
    said = (launched.folder / "controller.out").read_text()
    assert said.count(f"run directory {launched.root}") == 2
    assert {path.name for path in launched.root.parent.iterdir()} == {"launch", "run"}


def test_nothing_is_lost_and_nothing_is_trained_twice(launched):
    assert not flaws(launched.root / "ledger.db")
    samples = json.loads((launched.root / "summary.json").read_text())["samples"]
    assert samples["issued"] == sum(count for fate, count in samples.items() if fate != "issued")
    assert samples["trained"] == STEPS * 8 * 16 and not samples.get("pending")
    steps = [row["step"] for row in read_metrics(launched.root) if "loss" in row]
    assert len(steps) == len(set(steps))


def test_each_host_is_a_job_on_a_node_of_its_own(launched):
    assert len(launched.hosts_before) == 2 and len(set(launched.hosts_before.values())) == 2
    assert len(list(launched.folder.glob("*-host?-*.out"))) == 4, "two for each start of the controller"
    assert not launched.hosts(), "and none is left in the queue"


def test_no_process_is_left(launched):
    assert launched.left == {node: [] for node in NODES}


def test_no_key_is_in_what_was_submitted_or_printed(launched):
    texts = [path.read_text() for path in launched.folder.iterdir() if path.is_file()]
    assert len(texts) > 4 and not any("PRIVATE KEY" in text for text in texts)
    keys = list((launched.folder / "certificates").glob("*.key"))
    assert keys and not any(key.stat().st_mode & 0o077 for key in keys)
