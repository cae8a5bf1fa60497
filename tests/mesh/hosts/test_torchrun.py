"""torchrun's processes as hosts: what its variables mean, how the ranks meet, and the same losses as without it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from tree import TREE

from titan_rl.config import command_line
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.torchrun import (
    World,
    adopt,
    earlier_run,
    forget,
    record_run,
    refusal,
    report_to_torchrun,
    world_of,
)
from titan_rl.controller.session import Session
from titan_rl.mesh.launch import torchrun
from titan_rl.train import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def job(tmp_path) -> Path:
    """A folder such as torchrun makes for a start of two processes."""
    for rank in (0, 1):
        (tmp_path / "job" / "attempt_0" / str(rank)).mkdir(parents=True)
    (tmp_path / "job").chmod(0o700)
    return tmp_path / "job"


def variables(job: Path, rank: int, **others: str) -> dict[str, str]:
    """As torch 2.13 sets them."""
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    its = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "ROLE_NAME": "default", "OMP_NUM_THREADS": "1"}
    elastic = {"RUN_ID": "x", "RESTART_COUNT": "0", "ERROR_FILE": str(job / "attempt_0" / str(rank) / "error.json")}
    return ours | its | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()} | others


# variables


def test_a_rank_knows_its_place(job):
    world = world_of(variables(job, 1, TORCHELASTIC_RESTART_COUNT="3"))
    assert (world.rank, world.size, world.restarts) == (1, 2, 3)
    assert (world.attempt, world.job) == (job / "attempt_0", job)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "2", "RANK": "0"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_what_torchrun_did_not_start_has_no_world(environment):
    assert world_of(environment) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["9" * 5000, "x", "-1"])
def test_what_is_no_number_of_processes_is_one_line(job, name, value, monkeypatch, capsys):
    for variable, given in (variables(job, 0) | {name: value}).items():
        monkeypatch.setenv(variable, given)
    if (name, value.isdecimal()) == ("WORLD_SIZE", False):
        assert world_of(os.environ) is None
        return
    assert command_line.answer(lambda arguments: 0, []) == command_line.EXIT_USER
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"titan-rl: {name} = ") and line.endswith(f"unset {name}") and len(line) < 200


def test_one_node_and_a_folder_of_ones_own_are_wanted(job):
    assert refusal(variables(job, 0)) == ""
    assert "--nnodes=1" in refusal(variables(job, 0, WORLD_SIZE="4"))
    assert "--log-dir" in refusal(variables(job, 0, TORCHELASTIC_ERROR_FILE=""))
    assert "unset it" in refusal({"WORLD_SIZE": "2", "RANK": "0"})
    job.chmod(0o755)
    assert "chmod 700" in refusal(variables(job, 0))
    shutil.rmtree(job)
    assert "cannot be read" in refusal(variables(job, 0))


def test_actors_are_no_ranks_of_torchrun(job):
    environment = variables(job, 0) | {"PATH": "/bin", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    forget(environment)
    assert environment == {"PATH": "/bin"}
    environment = {"OMP_NUM_THREADS": "3"}  # the user's
    forget(environment)
    assert environment == {"OMP_NUM_THREADS": "3"}


# ranks of the trainer


def adopted(size: int, **parallelism):
    config = load_config(None, {"parallelism": parallelism})
    adopt(config, World(0, size, 0, None))
    return config.titan["parallelism"]["data_parallel_shard_degree"]


@pytest.mark.parametrize(
    ("size", "parallelism", "shards"),
    [
        (2, {}, 2),
        (1, {}, 1),
        (2, {"data_parallel_shard_degree": -1}, 2),
        (8, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 2),
        (2, {"pipeline_parallel_degree": 2}, 1),
        (2, {"data_parallel_shard_degree": 2}, 2),
        (2, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2, "expert_parallel_degree": 2}, 1),
    ],
)
def test_processes_are_trainer_ranks(size, parallelism, shards):
    assert adopted(size, **parallelism) == shards


@pytest.mark.parametrize(
    ("size", "parallelism", "said"),
    [
        (2, {"data_parallel_shard_degree": 1}, "needs 1"),
        (4, {"data_parallel_shard_degree": 2}, "data_parallel_shard_degree = 2) needs 2"),
        (3, {"tensor_parallel_degree": 2}, "needs a multiple of 2"),
        (1, {"data_parallel_shard_degree": 2}, "needs 2"),
    ],
)
def test_another_number_of_ranks_is_refused_in_one_line(size, parallelism, said):
    with pytest.raises(ConfigError, match="--nproc_per_node") as told:
        adopted(size, **parallelism)
    assert said in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("degree", ["2", -2, 0, 1.5, True])
def test_what_is_no_degree_is_left_to_be_told_by_its_section(degree):
    """Zero and fractions too: they are wrong with or without torchrun."""
    table = {"tensor_parallel_degree": degree}
    assert "data_parallel_shard_degree" not in _adopt_table(table)
    if degree != 0:
        assert _adopt_table({"data_parallel_shard_degree": degree})["data_parallel_shard_degree"] == degree


def _adopt_table(table: dict) -> dict:
    config = load_config(None, {"parallelism": table})
    adopt(config, World(0, 2, 0, None))
    return config.titan["parallelism"]


@pytest.mark.parametrize("mesh", [{"worker_loops": 2}, {"worker_loops": 1, "launcher": "a:b"}])
def test_worker_loops_beside_torchruns_processes_are_refused(mesh):
    with pytest.raises(ConfigError, match="mesh.worker_loops"):
        adopt(load_config(None, {"mesh": mesh}), World(0, 2, 0, None))


# what is told, and what is kept for another start


def test_torchrun_reads_why_a_rank_failed(job):
    world = world_of(variables(job, 0))
    report_to_torchrun(world, "titan-rl: torchrun rank 1 died")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(world.error_file))
    assert failure.message["extraInfo"]["py_callstack"] == "titan-rl: torchrun rank 1 died"
    assert abs(failure.timestamp - time.time()) < 60


def test_only_a_job_that_is_started_again_has_a_run(job):
    first = world_of(variables(job, 0))
    assert earlier_run(first) is None
    again = world_of(variables(job, 0, TORCHELASTIC_RESTART_COUNT="1"))
    assert earlier_run(again) is None  # the first start did not come so far
    record_run(first, Path("runs/a"))
    assert earlier_run(again) == str(Path("runs/a").absolute()) and earlier_run(first) is None
    for damaged in ("[1]", "null", "[" * 100_000):
        (job / "titan_rl_run.json").write_text(damaged)
        assert earlier_run(again) is None
    record_run(first, Path("runs/a"))
    job.chmod(0o777)
    assert earlier_run(again) is None


def test_a_session_of_a_script_is_no_rank(job, monkeypatch):
    """Each rank of such a script would start a run of its own."""
    for name, value in variables(job, 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        Session.open(load_config(None))


@pytest.mark.parametrize("rank", [0, 1])
def test_where_torchrun_runs_over_nodes_only_the_first_rank_speaks(rank, job, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "_OTHERS_WAIT_SECONDS", 0.0)
    for name, value in variables(job, rank, WORLD_SIZE="4").items():
        monkeypatch.setenv(name, value)
    if rank:
        with pytest.raises(SystemExit):
            main(["quickstart"])
    else:
        assert main(["quickstart"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (rank == 0) and all("--nnodes=1" in line for line in lines)


# how the ranks meet

RANK_1 = """
import json, os, sys, time
from titan_rl.config.torchrun import world_of
from titan_rl.mesh.launch.torchrun import announce, serve

def listen(address):
    print(json.dumps([address, os.environ.get("MARK"), os.environ.get("RANK")]), flush=True)
    time.sleep(60)

world = world_of(os.environ)
announce(world)
serve(world, listen)
"""


@pytest.fixture
def rank_1(job):
    process = subprocess.Popen([sys.executable, "-c", RANK_1], env=os.environ | variables(job, 1))
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def controller(job):
    """A process that stands for rank 0."""
    process = subprocess.Popen(["sleep", "60"])
    (job / "attempt_0" / "titan_rl_rank_0.json").write_text(str(process.pid))
    yield process
    process.kill()
    process.wait()


def wait_for(path: Path, seconds: float = 30) -> str:
    deadline = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_a_rank_is_a_host_for_as_long_as_rank_0_lives(job, rank_1, controller, tmp_path):
    ranks = torchrun.OtherRanks(world_of(variables(job, 0)))
    assert ranks.count == 1
    assert ranks.engage(1, "address", {"MARK": "m"}, (str(tmp_path), "rank")) == rank_1.pid
    assert json.loads(wait_for(tmp_path / "rank.txt")) == ["address", "m", None]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        rank_1.send_signal(number)
    time.sleep(0.2)
    assert rank_1.poll() is None  # the run is being saved
    controller.kill()
    assert rank_1.wait(60) == 0


def test_a_rank_ends_with_a_rank_0_that_wants_nothing_of_it(job, rank_1, controller):
    wait_for(job / "attempt_0" / "titan_rl_rank_1.json")
    controller.kill()
    assert rank_1.wait(60) == 0


def test_a_rank_that_does_not_come_is_told(job, monkeypatch):
    monkeypatch.setattr(torchrun, "_MEETING_SECONDS", 0.05)
    with pytest.raises(torchrun.RankMissing, match="rank 1"):
        torchrun.OtherRanks(world_of(variables(job, 0))).engage(1, "address", {}, (None, "rank"))


# run_train.sh


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"NGPU": "4", "CONFIG_FILE": "a.toml", "LOG_RANK": "0,1"},
            ["--nproc_per_node=4", "--local-ranks-filter=0,1", "a.toml"],
        ),
        ({"NGPU": "1"}, ["--nproc_per_node=1", "--local-ranks-filter=0", "quickstart"]),
    ],
)
def test_the_script_takes_the_variables_of_torchtitans(given, expected, tmp_path):
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | given
    script = ["bash", str(TREE / "scripts" / "run_train.sh"), "--training.steps", "3"]
    arguments = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(expected) <= set(arguments) and arguments[-3:] == [expected[-1], "--training.steps", "3"]
    assert arguments[arguments.index("-m") + 1] == "titan_rl.train"


# the real torchrun, and a run that is none

STUB = """
import asyncio, sys, types
from pathlib import Path
sys.modules["titan_rl.controller.session"] = types.SimpleNamespace(one_line=str)  # its imports take seconds
from titan_rl import train
from titan_rl.controller.loop.shutdown import Stopped, StopRequest
from titan_rl.records.run_directory.rundir import RunDir

FOLDER = Path(sys.argv[1])

class Stub:
    '''The first start of its job fails, the second waits to be stopped.'''
    def __init__(self, config, file, resume, trial, ranks):
        self.run_dir, self.stop_request, self.why_ended = RunDir(FOLDER / "run"), StopRequest(), "a fault"
        self.is_first, self.stop = not resume, self.stop_request.ask
        with open(FOLDER / "opened", "a") as record:
            print(config.run.dir, resume, ranks.count, config.titan["parallelism"], file=record)
    async def start(self):
        if self.is_first:
            raise ValueError("the first start fails")
    async def run(self):
        (FOLDER / "waits").write_text("waits")
        while not self.stop_request.is_requested:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        raise Stopped
    def log(self, text):
        pass
    async def close(self, error, why):
        with open(FOLDER / "closed", "a") as record:
            print(why, file=record)

train._open = Stub
sys.exit(train.main(["quickstart"]))
"""


def test_a_job_goes_on_with_its_run_when_it_is_started_again_and_ctrl_c_saves_it(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    flags = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(tmp_path / "stub.py"), str(tmp_path)]
    job = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(tmp_path / "waits", seconds=200)
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=100)
    finally:
        job.kill()
        job.wait()
    layout = "{'data_parallel_shard_degree': 2}"
    assert (tmp_path / "opened").read_text().splitlines() == [f" False 1 {layout}", f"{tmp_path}/run True 1 {layout}"]
    assert (tmp_path / "closed").read_text().splitlines() == ["the first start fails", "stopped by the user"]
    assert "forcefully" not in said  # both ranks ended by themselves
