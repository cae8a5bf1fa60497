"""What is submitted to Slurm, as text. No key of a run is in it: scripts name the folder that holds them."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_rl.mesh.launch.slurm.options import SlurmOptions

FIRST_PORT, NUM_PORTS = 20000, 12000
"""Below those that a system gives out by itself."""
_WAIT_SECONDS = 600


def port_of(job: int) -> int:
    """Where a host listens that is that job. Jobs have numbers of their own, so two that run at once share no port."""
    return FIRST_PORT + job % NUM_PORTS


def job_name(options: SlurmOptions, number: int) -> str:
    """Of a host's job."""
    return f"{options.name}-host{number}"


def host_script(options: SlurmOptions, number: int, certificates: str) -> str:
    """A host: one job of one node. A multi-node job would end as a whole with any of its nodes. It is never requeued:
    the run asks for another one. ``certificates``: a folder; empty: tcp."""
    name = job_name(options, number)
    resources = {"gpus-per-node": options.gpus, "cpus-per-task": options.cpus, "mem": options.memory}
    lines = [f"--job-name={name}", "--no-requeue", f"--output={shlex.quote(f'{options.folder}/{name}-%j.out')}"]
    lines += [f"--{key}={value}" for key, value in resources.items() if value]
    lines += ["--exclusive"] if options.exclusive else []
    port = f"$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
    scheme, way = ("tls", f"--certificates {shlex.quote(certificates)}") if certificates else ("tcp", "--insecure")
    command = f'host "{scheme}://$SLURMD_NODENAME:{port}" {way} --once --wait {_WAIT_SECONDS}'
    return _script(options, [*lines, *options.sbatch], [f"exec {program()} {command}"])


def controller_script(options: SlurmOptions, work: Path, body: Sequence[str]) -> str:
    """The job of a run's controller, which a requeue begins again. ``body``: lines of shell, in the folder ``work``."""
    lines = [
        f"--job-name={options.name}",
        "--requeue",
        "--open-mode=append",
        f"--output={shlex.quote(f'{options.folder}/controller.out')}",
        f"--chdir={shlex.quote(str(work))}",
    ]
    return _script(options, [*lines, *options.controller], body)


def program() -> str:
    """``titan-rl`` of this environment, which is at the same path on the nodes."""
    return f"{shlex.quote(sys.executable)} -m titan_rl.cli"


def _script(options: SlurmOptions, lines: Sequence[str], body: Sequence[str]) -> str:
    common = {"partition": options.partition, "account": options.account, "qos": options.qos, "time": options.time}
    shared = ["--nodes=1", "--ntasks=1", *(f"--{key}={value}" for key, value in common.items() if value)]
    header = [f"#SBATCH {line}" for line in (*shared, *lines)]
    return "\n".join(["#!/bin/bash", *header, "set -u", *options.setup, *body, ""])
