"""What the manifests of ``titan-rl launch k8s`` have pods do, on hosts of namespaces that play the pods.

No API server is here, so its part is the test's: names in DNS, the contents of Secret and ConfigMap, and that a
container that has ended is started again at the same name.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import machines
import pytest
import yaml

from titan_rl.records.ledger.audit import flaws
from titan_rl.records.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(bool(why := machines.why_not()), reason=why or "they can be made"),
]
STEPS = 60
_SECONDS = 400.0
SETTINGS = {
    "training.steps": STEPS,
    "sft.steps": 3,
    "rollout.prompts_per_step": 8,
    "eval.prompts": 16,
    "checkpoint.every": 5,
    "hosts.trainer": "[0]",
    "hosts.generator": "[1]",
    "hosts.silence": 8.0,
    "hosts.options.image": "registry.example/titan-rl:1",
    "hosts.options.name": "r",
}


class Pods:
    """Of one run: two hosts and a controller."""

    def __init__(self, cluster: machines.Machines, out: Path):
        self.cluster, self.out = cluster, out
        asked = [f"--{key}={value}" for key, value in SETTINGS.items()]
        command = [sys.executable, "-m", "titan_rl.cli", "launch", "k8s", "quickstart", "--nodes", "2", "--dry-run"]
        subprocess.run([*command, "--folder", str(out / "launch"), *asked], check=True, capture_output=True)
        files = sorted((out / "launch").glob("*.yaml"))
        self.parts = {part["kind"]: part for file in files for part in yaml.safe_load_all(file.read_text())}
        self._mount()
        self._name()
        self.started: dict[str, list[subprocess.Popen]] = {name: [] for name in cluster.names}
        self.root = out / "claim" / "r"

    def _mount(self) -> None:
        """What the pods find in volumes."""
        contents = {name: base64.b64decode(text) for name, text in self.parts["Secret"]["data"].items()}
        contents = {f"certificates/{name}": data for name, data in contents.items()}
        contents |= {f"config/{name}": text.encode() for name, text in self.parts["ConfigMap"]["data"].items()}
        for name, data in contents.items():
            path = self.out / "etc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o440)
        (self.out / "claim").mkdir()

    def _name(self) -> None:
        domain = "r.default.svc.cluster.local"
        names = {"ctl": f"controller.{domain}", "A": f"r-host-0.{domain}", "B": f"r-host-1.{domain}"}
        with open(self.cluster.state / "hosts", "a") as file:
            file.writelines(f"{self.cluster.address(host)} {name}\n" for host, name in names.items())

    def start(self, host: str) -> None:
        kind = "Job" if host == "ctl" else "StatefulSet"
        [container] = self.parts[kind]["spec"]["template"]["spec"]["containers"]
        script = container["command"][-1]
        for there, here in {"/etc/titan-rl": f"{self.out}/etc", "/run/titan-rl": "/tmp/own"}.items():
            script = script.replace(there, here)
        script = script.replace("/runs/", f"{self.out}/claim/")
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment["POD"] = {"A": "r-host-0", "B": "r-host-1", "ctl": "r-controller-x"}[host]
        with open(self.out / f"{host}.txt", "a") as file:
            options = dict(env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            self.started[host].append(self.cluster.start(host, "sh", "-c", script, **options))

    def wait(self, is_so, what: str) -> None:
        """Hosts that end meanwhile are started again."""
        deadline = time.monotonic() + _SECONDS
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {self.output()}"
            for host in ("A", "B"):
                if self.started[host][-1].poll() is not None:
                    self.start(host)
            time.sleep(0.1)

    def kill(self, host: str) -> None:
        """All that runs in a pod."""
        for pid in self.cluster.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.started[host][-1].wait(60)

    def steps(self) -> set[int]:
        if not (self.root / "metrics.jsonl").exists():
            return set()
        return {row["step"] for row in read_metrics(self.root) if "loss" in row}

    def events(self, kind: str) -> list[dict]:
        lines = (self.root / "events.jsonl").read_text().splitlines() if self.root.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def starts_of(self, host: str) -> int:
        return sum(event["name"].startswith(host) for event in self.events("started"))

    def output(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.out.glob("*.txt"))


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    out = tmp_path_factory.mktemp("k8s")
    with machines.Machines("ctl", "A", "B", folder=out) as cluster:
        pods = Pods(cluster, out)
        for host in cluster.names:
            pods.start(host)
        pods.wait(lambda: 3 in pods.steps(), "step 3")
        pods.kill("B")
        pods.wait(lambda: pods.starts_of("host 1") == 2, "the return of host 1")
        pods.steps_at_return = pods.steps()
        pods.kill("ctl")
        pods.start("ctl")
        pods.wait(lambda: pods.started["ctl"][-1].poll() is not None, "the end of the run")
        yield pods


def test_a_pod_that_comes_back_is_taken_up(pods):
    assert pods.starts_of("host 1") == 3, "at first, after its death, and for the next controller"
    assert max(pods.steps_at_return) < STEPS


def test_a_controller_that_is_started_again_goes_on(pods):
    assert pods.started["ctl"][-1].returncode == 0, pods.output()
    assert pods.steps() == set(range(1, STEPS + 1))
    [resumed] = pods.events("resumed")
    assert resumed["step"] >= max(pods.steps_at_return) - 1


def test_nothing_is_lost(pods):
    assert not flaws(pods.root / "ledger.db")
    samples = json.loads((pods.root / "summary.json").read_text())["samples"]
    assert samples["issued"] == sum(count for fate, count in samples.items() if fate != "issued")
    assert samples["trained"] == STEPS * 8 * 16 and not samples.get("pending")
