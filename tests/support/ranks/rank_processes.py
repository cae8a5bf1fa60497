"""Ranks in processes of their own, forked from one that has done their imports, which take longer than what they do."""

import torch.multiprocessing as multiprocessing

multiprocessing.set_forkserver_preload(
    [
        "titan_rl.trainer.join",
        "titan_rl.trainer.state.checkpoint_state",
        "titan_rl.trainer.titan_config",
        "torchtitan.trainer",
    ]
)


def run_ranks(rank, num_ranks: int, *arguments) -> None:
    """``rank(index, *arguments)`` in each. Errors: ProcessRaisedException, with what the first to fail said."""
    multiprocessing.start_processes(rank, arguments, nprocs=num_ranks, start_method="forkserver")
