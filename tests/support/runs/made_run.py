"""A run directory as a run of two steps leaves it, made without a run: for whoever reads, resumes or forges one."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from running import overrides
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.controller.preflight.checks import resolve
from titan_rl.data.types import Group, Rollout, Turn
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.sources import find_sources, write_sources
from titan_rl.records.steps.rollouts import write_rollouts

STEPS, GROUPS, SAMPLES = 2, 4, 4


def config_of(root: Path, **settings) -> Config:
    """Of the small runs of these tests."""
    config = load_config(None, parse_overrides(overrides(**{"training__steps": STEPS} | settings)))
    config.run.dir = str(root)
    return config


def made_run(root: Path, *, checkpoint: int = STEPS, **settings) -> RunDir:
    """``checkpoint``: the step that is saved; 0 for none."""
    config, run_dir = config_of(root, **settings), RunDir(root)
    run_dir.open(resolve(config).as_dict())
    run_dir.close()
    write_sources(run_dir, find_sources(config))
    _record_steps(run_dir)
    if checkpoint:
        save(run_dir, checkpoint)
    return run_dir


def _record_steps(run_dir: RunDir) -> None:
    ledger = Ledger(run_dir.ledger)
    with open(run_dir.root / "metrics.jsonl", "w") as metrics:
        for step in range(1, STEPS + 1):
            names = [f"train/{(step - 1) * GROUPS + index:07d}" for index in range(GROUPS)]
            ledger.issue(names, SAMPLES)
            write_rollouts(
                run_dir.rollouts, step, [Group(name, [_rollout(name, s) for s in range(4)]) for name in names]
            )
            ledger.settle({name: [None] * SAMPLES for name in names}, step)
            metrics.write(json.dumps({"step": step, "reward": 0.5, "loss": 0.25, "grad_norm": 1.5}) + "\n")
    ledger.close()


def _rollout(name: str, sample: int) -> Rollout:
    return Rollout(
        name,
        sample,
        tokens=np.array([5, 6, 7, 8], np.int32),
        provenance=np.array([0, 0, 1, 1], np.int8),
        logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
        versions=np.array([-1, -1, 0, 0], np.int32),
        turns=[Turn(2, 4, "stop")],
        status="ok",
        reward=float(sample % 2),
        reward_parts={"score": float(sample % 2)},
        text="12",
    )


def save(run_dir: RunDir, step: int, state: dict | None = None) -> Path:
    """A checkpoint with a tensor and a value in it, or with ``state``."""
    folder = CheckpointFolder(run_dir.checkpoints, keep_latest_k=9)
    writing = folder.begin(step)
    dcp.save(state or {"model": {"w": torch.ones(4)}, "scheduler": {"last_epoch": step}}, checkpoint_id=writing)
    return folder.commit(writing, ControllerState(step, GROUPS * step, {"correct": 3, "count": 8}, 1.5))


def write_state(at: Path | str, step: int) -> None:
    """As a rank writes it into a store."""
    state = {"model": {"w": torch.ones(4)}, "scheduler": {"last_epoch": step}}
    dcp.save(state, storage_writer=FsspecWriter(str(at)))


def forge(checkpoint: Path, **changes) -> None:
    """Give a checkpoint's files new checksums, as whoever changed them would; ``changes`` go into state.json."""
    path = checkpoint / "state.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    for name in list(manifest["files"]):
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    manifest |= changes
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest | {"checksum": checksum}))


class Payload:
    """Writes the canary when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return (Path.write_text, (self.canary, "code of the run directory was run"))
