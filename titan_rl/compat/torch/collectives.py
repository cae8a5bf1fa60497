"""The end of collectives that wait for a rank which died."""

from torch.distributed import distributed_c10d

from titan_rl.compat.reach import TORCH, Reach

REACHES = (
    Reach("torch.distributed.distributed_c10d:_abort_process_group", "end collectives that wait for a dead rank"),
)
TORCH.require(REACHES)


def abort_process_groups() -> None:
    """Abort all groups of this process, from any thread."""
    distributed_c10d._abort_process_group()
