"""A version goes to another process: by CUDA IPC, in a rehearsal through shared memory. Both ends must have the same
bytes."""

import json
import pickle
import subprocess
import sys
from typing import Any

import torch

from gpu_check.fixtures import House
from titan_rl.mesh.channel.plan import ReadPlan
from titan_rl.mesh.channel.reader import ReaderSetup


def check(house: House) -> dict[str, Any]:
    trainer = house.trainer("1b", house.config())
    plan = house.plan(trainer)
    region = house.open_region(trainer, plan.slot(0))
    for version in (0, 1, 2):
        trainer.stage(version)
        trainer.writer.wait()
    reads = plan.reads(0, 0)
    setup = ReaderSetup(reads, [region], ["cuda_ipc" if house.bench.on_gpu else "shared_memory"])
    asked = pickle.dumps((setup, str(house.device), (1, 2)))
    reader = [sys.executable, "-m", "gpu_check.reader"]
    done = subprocess.run(reader, input=asked, stdout=subprocess.PIPE, timeout=100)
    if done.returncode:
        raise RuntimeError(f"the other process ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    sums = _sums(trainer.writer.region.slots[0], reads)
    return {
        "same_bytes": found["sums"] == sums,
        "seconds_fetch": found["seconds"],
        "seconds_open": found["seconds_open"],
        "gib": reads.nbytes / 2**30,
        "gb_per_second": reads.nbytes / found["seconds"] / 1e9,
    }


def _sums(slot: torch.Tensor, reads: ReadPlan) -> list[str]:
    from gpu_check.reader import digest

    return [digest(slot[read.offset : read.offset + read.nbytes]) for read in reads.reads]
