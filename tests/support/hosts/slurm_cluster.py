"""A real Slurm on hosts of namespaces (machines.py): one that schedules, and nodes that work.

Its programs are of Debian's slurm-wlm and munge, and need neither systemd nor a shared /etc: everything that they read
and write is in the folder of the hosts.
"""

import os
import shutil
import subprocess
import time

import machines

_CONF = """\
ClusterName=titanrl
SlurmctldHost={scheduler}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=10
KillWait=60
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_UP_SECONDS = 60.0


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol", "flock")
    missing = [name for name in programs if shutil.which(name, path=_path()) is None]
    return f"a Slurm needs {missing[0]} (Debian's slurm-wlm and munge)" if missing else machines.why_not()


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """Up as soon as it is made, and gone with its hosts."""

    def __init__(self, cluster: machines.Machines, scheduler: str, nodes: tuple[str, ...]):
        self._cluster, self._scheduler = cluster, scheduler
        self.folder = folder = cluster.state / "slurm"
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(_CONF.format(scheduler=scheduler, folder=folder, nodes=",".join(nodes)))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.environment = os.environ | {"PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self._start(scheduler, "munged", "--foreground", "--force", *munge)
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._start(scheduler, "slurmctld", "-D")
        for node in nodes:
            (folder / f"spool.{node}").mkdir()
            self._start(node, "slurmd", "-D")
        self._wait(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(nodes), "all nodes")

    def _start(self, host: str, *command: str) -> None:
        with open(self.folder / f"{command[0]}.{host}.out", "w") as file:
            self._cluster.start(
                host, *command, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def _wait(self, is_up, what: str) -> None:
        deadline = time.monotonic() + _UP_SECONDS
        while not is_up():
            told = {path.name: path.read_text()[-600:] for path in self.folder.glob("*.out")}
            assert time.monotonic() < deadline, f"Slurm did not come up: {what}: {told}"
            time.sleep(0.1)

    def run(self, *command: str) -> str:
        """A command on the scheduler's host; what it prints. One that fails prints nothing."""
        asked = self._cluster.start(
            self._scheduler,
            *command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return asked.communicate(timeout=60)[0]

    def jobs(self) -> dict[str, tuple[str, str, str]]:
        """Of all that is known: number to name, state and node."""
        rows = (line.split("|") for line in self.run("squeue", "-h", "--states=all", "-o", "%A|%j|%T|%N").splitlines())
        return {number: (name, state, node) for number, name, state, node in rows}

    def log(self) -> str:
        return (self.folder / "slurmctld.log").read_text()
