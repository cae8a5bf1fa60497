"""Ranks in processes of their own, forked from one that has done their imports, which take longer than what they do."""

import faulthandler
import os
import tempfile
from pathlib import Path

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
    """``rank(index, *arguments)`` in each. Errors: RuntimeError, with what each rank last wrote to stderr."""
    with tempfile.TemporaryDirectory() as logs:
        try:
            multiprocessing.start_processes(
                _logged, (Path(logs), rank, arguments), nprocs=num_ranks, start_method="forkserver"
            )
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            said = [f"rank {log.name}: {_end_of(log)}" for log in sorted(Path(logs).iterdir())]
            raise RuntimeError("\n".join([str(error), *said])) from error


def _end_of(log: Path) -> str:
    text, *_ = log.read_text(errors="replace").partition("\nExtension modules: ")
    return text[-8000:]


def _logged(index: int, logs: Path, rank, arguments: tuple) -> None:
    """What C++ says as it aborts, and where each thread stood, goes to a file of the rank's own."""
    file = os.open(logs / str(index), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 2)
    faulthandler.enable()
    rank(index, *arguments)
