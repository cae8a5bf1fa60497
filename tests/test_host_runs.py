"""A run over hosts that share nothing but a wire, one of which loses its power; and who else may come in."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import machines
import pytest
import running

from titan_rl.mesh.launch.interfaces import HOST_ADDRESS
from titan_rl.records.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := machines.why_not()), reason=why or "they can be made"),
]
HOSTS = ("A", "B", "C")
STEPS = 24
"""So many that a host's power fails long before the last, on a fast machine too."""
SETTINGS = dict(
    training__steps=STEPS,
    sft__steps=5,
    parallelism__data_parallel_shard_degree=2,
    checkpoint__every=8,
    rollout__prompts_per_step=8,
    generator__tensor_parallel=2,
)
ON_HOSTS = dict(
    hosts__launcher="attach",
    hosts__addresses=json.dumps([f"tls://{name}:26600" for name in HOSTS]),
    hosts__controller="ctl",
    hosts__trainer="[0, 1]",
    hosts__generator="[2]",
    hosts__verifier="[2]",
    hosts__silence=8.0,
)
_SECONDS = 240.0


def losses(root: Path) -> dict[int, tuple[float, float]]:
    """Of each step, and its gradient norm."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(root) if "loss" in row}


class Run:
    """Over four machines; the second trainer's loses its power when two steps are done."""

    def __init__(self, cluster: machines.Machines, out: Path):
        self.cluster, self.certificates = cluster, str(cluster.state / "certificates")
        python = [sys.executable, "-m", "titan_rl.cli"]
        made = [*python, "host", "--make-certificates", self.certificates, "ctl", *HOSTS]
        subprocess.run(made, check=True, capture_output=True)
        keys, self.out = ["--certificates", self.certificates], out
        self.hosts = {name: self._start(out, name, *python, "host", f"tls://{name}:26600", *keys) for name in HOSTS}
        self.root, self.output = cluster.path("ctl", "/tmp/run"), out / "ctl.txt"

    def begin(self) -> None:
        asked = running.overrides(**SETTINGS, **ON_HOSTS, hosts__certificates=self.certificates)
        command = [sys.executable, "-m", "titan_rl.cli", "train", "--run.dir", "/tmp/run", *asked]
        self.controller = self._start(self.out, "ctl", *command)

    def _start(self, out: Path, name: str, *command: str) -> subprocess.Popen:
        with open(out / f"{name}.txt", "w") as file:
            return self.cluster.start(name, *command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def wait_until_hosts_listen(self) -> None:
        deadline = time.monotonic() + _SECONDS
        while not all(self._listens(name) for name in HOSTS):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _listens(self, name: str) -> bool:
        rows = Path(f"/proc/{self.cluster.first(name)}/net/tcp").read_text()
        return f":{26600:04X} 00000000:0000 0A" in rows

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + _SECONDS
        while not ((self.root / "metrics.jsonl").exists() and step in losses(self.root)):
            assert self.controller.poll() is None, self.output.read_text()[-3000:]
            assert time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.05)


def strangers_get(cluster: machines.Machines, *addresses: str) -> list[str]:
    """What a process on a host without certificates gets at these addresses."""
    command = [sys.executable, str(Path(__file__).with_name("outsider.py")), *addresses]
    stranger = cluster.start("X", *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said, _ = stranger.communicate(timeout=60)
    return [line.split(": ", 1)[1] for line in said.splitlines()]


def told(cluster: machines.Machines, name: str) -> list[tuple[str, str]]:
    """Of each process on a host that knows where others reach it: that address, and the certificate that it shows."""
    found = []
    for pid in cluster.processes(name):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/environ").read_text().split("\0")
            known = dict(field.split("=", 1) for field in fields if "=" in field)
            if HOST_ADDRESS in known:
                found.append((known[HOST_ADDRESS], known.get("HYPERACTOR_TLS_CERT", "")))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("hosts")
    with machines.Machines("ctl", *HOSTS, "X", folder=out) as cluster:
        run = Run(cluster, out)
        run.wait_until_hosts_listen()
        run.got = strangers_get(cluster, "tls://A:26600", "tcp://C:26600")
        run.begin()
        run.wait_for_step(2)
        run.told = {name: told(cluster, name) for name in HOSTS}
        cluster.off("B")
        run.code = run.controller.wait(_SECONDS)
        run.codes = {name: run.hosts[name].wait(30) for name in ("A", "C")}
        run.left = {name: list(cluster.path(name, "/tmp").glob("titan_rl_*")) for name in ("A", "C")}
        yield run


def test_all_steps_are_done_with_one_host_less(run):
    assert run.code == 0, run.output.read_text()[-3000:]
    assert "lost host 1 (B)" in run.output.read_text(), "the fault has happened"
    assert sorted(losses(run.root)) == list(range(1, STEPS + 1))


def test_it_learns_what_it_learns_on_one_host(run, tmp_path):
    assert running.train(tmp_path / "one", **SETTINGS) == 0, running.output(tmp_path / "one")[-3000:]
    assert losses(run.root) == losses(tmp_path / "one"), "bit for bit, also what was done again"
    assert ledger(run.root) == ledger(tmp_path / "one")
    for name in ("checkpoints/step-000016", "checkpoints/step-000024", "model"):
        assert files(run.root / name) == files(tmp_path / "one" / name), "carried from the hosts"


def test_weights_and_batches_travel_over_tcp_inside_the_run_s_tls(run):
    assert "weights by tcp (" in run.output.read_text(), run.output.read_text()[-3000:]
    for name in HOSTS:
        mine = run.cluster.address(name), str(Path(run.certificates, f"{name}.pem"))
        assert run.told[name] and set(run.told[name]) == {mine}
    synced = [
        row["weight_bytes_from_trainers"] for row in read_metrics(run.root) if "weight_bytes_from_trainers" in row
    ]
    assert synced and all(synced)


def ledger(root: Path) -> dict:
    return json.loads((root / "summary.json").read_text())["samples"]


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_hosts_end_with_their_run_and_nothing_is_left_on_them(run):
    assert run.codes == {"A": 0, "C": 0} and run.left == {"A": [], "C": []}


def test_what_actors_print_is_in_the_run_directory(run):
    assert any(path.name.startswith("trainer_rank_1") for path in (run.root / "logs").iterdir())


def test_whoever_has_no_certificate_gets_nothing(run):
    assert run.got == ["TimeoutError"] * 2


def test_the_same_stranger_gets_in_where_tcp_was_asked_for_by_name(run, tmp_path):
    """So it is the certificates that kept him out."""
    command = [sys.executable, "-m", "titan_rl.cli", "host", "tcp://10.78.0.2:26700", "--insecure"]
    host = run.cluster.start("A", *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert b"listening" in host.stdout.readline()
    [got] = strangers_get(run.cluster, "tcp://10.78.0.2:26700")
    assert got == "a process of user 0 on A"
