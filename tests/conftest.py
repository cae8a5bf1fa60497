"""What tests of several files stand on."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_group():
    """Of one rank, in this process, for as long as the tests of a file run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
