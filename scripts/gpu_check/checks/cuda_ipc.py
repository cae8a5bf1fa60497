"""A version goes to another process: by CUDA IPC, in a rehearsal through shared memory. Both ends must have the same
bytes."""

import json
import pickle
import subprocess
import sys
from typing import Any

import torch

from gpu_check.fixtures import Fixtures
from titan_rl.mesh.channel.plan import ReadPlan
from titan_rl.mesh.channel.reader import ReaderSetup


def check(fixtures: Fixtures) -> dict[str, Any]:
    trainer = fixtures.trainer("1b", fixtures.config())
    plan = fixtures.plan(trainer)
    region = fixtures.open_region(trainer, plan.slot(0))
    for version in (0, 1, 2):
        trainer.stage(version)
        trainer.writer.wait()
    reads = plan.reads(0, 0)
    setup = ReaderSetup(reads, [region], ["cuda_ipc" if fixtures.bench.on_gpu else "shared_memory"])
    request = pickle.dumps((setup, str(fixtures.device), (1, 2)))
    reader = [sys.executable, "-m", "gpu_check.reader"]
    done = subprocess.run(reader, input=request, stdout=subprocess.PIPE, timeout=100)
    if done.returncode:
        raise RuntimeError(f"the other process ended with {done.returncode}")
    reply = json.loads(done.stdout.splitlines()[-1])
    sums = _sums(trainer.writer.region.slots[0], reads)
    return {
        "same_bytes": reply["sums"] == sums,
        "seconds_fetch": reply["seconds"],
        "seconds_open": reply["seconds_open"],
        "gib": reads.nbytes / 2**30,
        "gb_per_second": reads.nbytes / reply["seconds"] / 1e9,
    }


def _sums(slot: torch.Tensor, reads: ReadPlan) -> list[str]:
    from gpu_check.reader import digest

    return [digest(slot[read.offset : read.offset + read.nbytes]) for read in reads.reads]
