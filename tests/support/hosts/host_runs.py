"""A run over hosts of namespaces: hosts that serve, controllers that come and go, and what is left of it all."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import machines
import running

from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events

SECONDS = 400.0
PORT = 26600
PYTHON = [sys.executable, "-m", "titan_rl.cli"]


def of_runs(cluster: machines.Machines, name: str) -> set[int]:
    """Processes of runs on a host, as seen from here; what forks them is no run's."""
    return {pid for pid in cluster.processes(name) if running.mark_of(pid).strip("0")}


def losses(root: Path) -> dict[int, tuple[float, float]]:
    """Of each step, and its gradient norm."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(root) if "loss" in row}


class OverHosts:
    """Over some machines, from one of which it is controlled. Its directory is one that all of them see."""

    def __init__(self, cluster: machines.Machines, out: Path, hosts: tuple[str, ...], controllers: tuple[str, ...]):
        """``out``: where machines' output goes, and the run."""
        self.cluster, self.out, self.names = cluster, out, hosts
        self.certificates, self.root = str(cluster.state / "certificates"), out / "run"
        made = [*PYTHON, "host", "--make-certificates", self.certificates, *controllers, *hosts]
        subprocess.run(made, check=True, capture_output=True)
        self.hosts: dict[str, subprocess.Popen] = {}
        for name in hosts:
            self.serve(name)

    def serve(self, name: str, *flags: str) -> None:
        """A machine becomes a host."""
        command = [*PYTHON, "host", f"tls://{name}:{PORT}", "--certificates", self.certificates, *flags]
        self.hosts[name] = self._start(name, *command)

    def end(self, name: str) -> int:
        """A machine is told to be a host no longer; with which code it ends."""
        os.kill(self._pid_of(name, self.hosts[name]), signal.SIGTERM)
        return self.hosts[name].wait(30)

    def _start(self, name: str, *command: str) -> subprocess.Popen:
        with open(self.out / f"{name}.txt", "a") as file:
            output = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            own = dict(os.environ, TMPDIR="/tmp")  # a machine's own, wherever this test's is
            return self.cluster.start(name, *command, env=own, **output)

    def said(self, name: str) -> str:
        return (self.out / f"{name}.txt").read_text()

    def begin(self, controller: str, *flags: str, **settings) -> subprocess.Popen:
        """Have this machine control the run."""
        addresses = json.dumps([f"tls://{name}:{PORT}" for name in self.names])
        settings |= dict(hosts__launcher="attach", hosts__addresses=addresses, hosts__certificates=self.certificates)
        asked = running.overrides(**settings, hosts__controller=controller)
        self.controlled_by = controller
        self.controller = self._start(controller, *PYTHON, "train", "--run.dir", str(self.root), *flags, *asked)
        return self.controller

    def interrupt(self) -> int:
        """The run is ended by Ctrl-C, after the step at hand; the controller's exit code."""
        os.kill(self._pid_of(self.controlled_by, self.controller), signal.SIGINT)
        return self.controller.wait(60)

    def _pid_of(self, name: str, started: subprocess.Popen) -> int:
        """Of what was started on a machine, not of what brought it there."""
        asked = " ".join(started.args[started.args.index("--") + 1 :])
        [pid] = [pid for pid in self.cluster.processes(name) if running.command_line(pid).strip() == asked]
        return pid

    def wait_until_hosts_listen(self, *names: str) -> None:
        self.wait_for(lambda: all(f"listening at tls://{name}" in self.said(name) for name in names or self.names))

    def wait_until_idle(self, *names: str) -> None:
        """Until hosts have ended what they did for a run that is over, and removed its folder, which comes last."""
        deadline = time.monotonic() + 30.0
        folders = {name: self.cluster.path(name, "/tmp") for name in names}  # the fork servers' stays
        while any(of_runs(self.cluster, name) or len([*folders[name].glob("titan_rl_*")]) > 1 for name in names):
            assert time.monotonic() < deadline, {name: of_runs(self.cluster, name) for name in names}
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: (self.root / "metrics.jsonl").exists() and step in losses(self.root))

    def wait_for(self, has_come) -> float:
        """Until it has, while the controller lives; the seconds that it took."""
        begun = time.monotonic()
        while not has_come():
            is_over = hasattr(self, "controller") and self.controller.poll() is not None
            assert not is_over and time.monotonic() < begun + SECONDS, self.said(self.controlled_by)[-3000:]
            time.sleep(0.05)
        return time.monotonic() - begun

    def events(self, kind: str, **fields) -> list[dict]:
        """Of that kind, with these fields."""
        with suppress(FileNotFoundError):
            found = [event for event in read_events(self.root) if event["kind"] == kind]
            return [event for event in found if all(event.get(key) == value for key, value in fields.items())]
        return []
