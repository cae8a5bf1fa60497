"""What tests of several files stand on."""

from pathlib import Path

import pytest
import torch.distributed as dist


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
