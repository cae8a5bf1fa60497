"""Slurm's commands as three small programs over a folder: what was submitted, and a file for each job."""

import os
import stat
from pathlib import Path

_SBATCH = """#!/bin/sh
number=$(($(ls {folder}/jobs | wc -l) + 41))
cp "$2" {folder}/script-$number; env > {folder}/environment-$number
[ -e {folder}/refuses ] && {{ echo "sbatch: error: invalid partition" >&2; exit 1; }}
echo "RUNNING|node$number" > {folder}/jobs/$number
echo $number
"""
_SQUEUE = """#!/bin/sh
echo look >> {folder}/looks
[ -e {folder}/away ] && {{ echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }}
for job in {folder}/jobs/*; do [ -s $job ] && echo "$(basename $job)|$(cat $job)"; done
exit 0
"""
_SCANCEL = """#!/bin/sh
echo "$@" >> {folder}/cancelled
[ -s {folder}/jobs/$1 ] && : > {folder}/jobs/$1
exit 0
"""


class FakeSlurm:
    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        for name, text in {"sbatch": _SBATCH, "squeue": _SQUEUE, "scancel": _SCANCEL}.items():
            program = folder / name
            program.write_text(text.format(folder=folder))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def set(self, job: int, state: str, node: str = "") -> None:
        (self.folder / "jobs" / str(job)).write_text(f"{state}|{node}\n")

    def mark(self, name: str, *, there: bool = True) -> None:
        """``refuses``: sbatch does; ``away``: squeue gets no answer."""
        (self.folder / name).touch() if there else (self.folder / name).unlink()

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""
