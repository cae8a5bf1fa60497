"""Runs that torchrun starts: the losses of `titan-rl train`, and what becomes of them when somebody dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import running
from running import listening

from titan_rl.records.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SIGNAL = {"sft__steps": 60}
"""Some answers are right from the first step on, so there is something to train."""


@contextmanager
def torchrun(root: Path, *flags: str, **settings) -> Iterator[subprocess.Popen]:
    """A job under way; its output goes to ``root``'s side."""
    command = [*TORCHRUN, *flags, "-m", "titan_rl.train", "--run.dir", str(root), *arguments(**settings)]
    with open(root.parent / f"{root.name}.out", "w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            for pid in {job.pid, *running.descendants(job.pid)}:
                os.kill(pid, signal.SIGKILL)
        job.wait(30)


def arguments(**settings) -> list[str]:
    return running.overrides(**SIGNAL | settings)


def ranks_of(job: subprocess.Popen) -> dict[int, int]:
    """Rank to process id."""
    found = {}
    for task in Path(f"/proc/{job.pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found |= {int(line.removeprefix("RANK=")): int(pid) for line in lines if line.startswith("RANK=")}
    return found


def pids_of(root: Path) -> dict[str, int]:
    return {name: int(pid) for pid, name in json.loads((root / "pids.json").read_text()).items()}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def steps_done(root: Path) -> int:
    return max((record["step"] for record in read_metrics(root) if "reward" in record), default=0)


def wait_for_step(root: Path, step: int) -> None:
    running.wait_for_step(root, step, timeout=300)


def losses(root: Path) -> list[tuple]:
    records = [record for record in read_metrics(root) if "reward" in record]
    return [(record["step"], record["reward"], record["loss"], record["grad_norm"]) for record in records]


@pytest.mark.confirms
def test_the_losses_are_those_of_titan_rl_train(tmp_path):
    """Two processes and a TOML that says nothing of ranks: two trainer ranks, to the bit as without torchrun."""
    with torchrun(tmp_path / "ranks", training__steps=3) as job:
        assert job.wait(300) == 0, running.output(tmp_path / "ranks")[-3000:]
    alone = dict(training__steps=3, parallelism__data_parallel_shard_degree=2)
    command = [sys.executable, "-m", "titan_rl.train", "--run.dir", str(tmp_path / "alone"), *arguments(**alone)]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    found = losses(tmp_path / "ranks")
    assert len(found) == 3 and any(grad_norm for *_, grad_norm in found)
    assert found == losses(tmp_path / "alone")
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("ranks", "alone")]
    assert weights[0] == weights[1]


def test_a_job_survives_its_actors_and_starts_again_without_a_rank(tmp_path):
    """An actor of rank 1 is replaced; rank 1 itself ends the job's first start; Ctrl-C saves the second."""
    root = tmp_path / "run"
    with torchrun(root, "--max-restarts=1", training__steps=2000) as job:
        wait_for_step(root, 2)
        ranks, pids = ranks_of(job), pids_of(root)
        assert pids["torchrun rank 1"] == ranks[1]
        scratch = running.scratch_folders(running.descendants(job.pid))
        places = listening({*ranks.values(), *pids.values()}, "/proc/net/unix")
        assert len(places) >= 4 and all(any(place.startswith(f"{one}/") for one in scratch) for place in places)
        stand_ins = [pid for pid in running.descendants(job.pid) if "fork_client" in running.command_line(pid)]
        trainers = [pid for pid in stand_ins if "/trainer " in running.command_line(pid)]
        assert {parent(pid) for pid in trainers} == set(ranks.values()), "one on each host"
        os.kill(pids["trainer rank 1"], signal.SIGKILL)
        wait_for_step(root, steps_done(root) + 2)
        assert pids_of(root)["trainer rank 1"] != pids["trainer rank 1"] and ranks_of(job) == ranks

        os.kill(ranks[1], signal.SIGKILL)
        before = steps_done(root)
        wait_for_step(root, before + 2)
        assert not set(ranks_of(job).values()) & set(ranks.values())
        every = running.descendants(job.pid)
        job.send_signal(signal.SIGINT)
        assert job.wait(120) != 0
        assert running.gone(every, 30)
    summary = json.loads((root / "summary.json").read_text())
    assert summary["why_ended"] == "stopped by the user" and summary["steps_done"] >= before + 2
    assert (root / "checkpoints" / f"step-{summary['steps_done']:06}").is_dir()
    records = [record["step"] for record in read_metrics(root) if "reward" in record]
    assert records == list(range(1, summary["steps_done"] + 1))  # nothing twice, nothing left out


@pytest.mark.confirms
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_job_with_the_reason(rank, tmp_path):
    root = tmp_path / "run"
    with torchrun(root, training__steps=2000) as job:
        wait_for_step(root, 2)
        ranks, every = ranks_of(job), running.descendants(job.pid)
        pid = ranks[rank]
        os.kill(pid, signal.SIGKILL)
        assert job.wait(60) == 1
        assert running.gone(every, 30)
    said = running.output(root)
    assert f"Signal 9 (SIGKILL) received by PID {pid}" in said
    if rank:
        assert f"exitcode  : 1 (pid: {ranks[0]})" in said  # by itself, before torchrun's patience was at its end
        why = f"torchrun rank 1 (process {pid}) died"
        assert json.loads((root / "summary.json").read_text())["why_ended"] == why and why in said
