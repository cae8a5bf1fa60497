"""Device of this process. Import this before any other torchtitan module: it sets TorchTitan's."""

import json
import os
import select
import signal

import numpy as np
import torch

import titan_rl.kernels.first_calls  # noqa: F401  (before any thread beside this one calls them)
from titan_rl.compat.torchtitan.device import DEVICE_TYPE

_taken: list[int] = []
"""The GPU that this process was given, as it is numbered on its host."""
_ASK_SECONDS = 60.0


def take_device(index: int | None) -> None:
    """Set this process's GPU (chosen by mesh/resources/devices.py); None: CPU."""
    _taken[:] = [] if index is None else [index]


def local_device(rank: int) -> torch.device:
    """Device of this process: the assigned one, or by rank outside a run."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, _taken[0] if _taken else rank % torch.accelerator.device_count())


def gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine, by a child process: CUDA then stays uninitialized in this one.

    Where it is initialized it listens at a socket that every user of the host may connect to.
    """
    if DEVICE_TYPE == "cpu":
        return []
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            module = torch.get_device_module(DEVICE_TYPE)
            sizes = [module.get_device_properties(i).total_memory for i in range(torch.accelerator.device_count())]
            os.write(writing, json.dumps(sizes).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        if not select.select([answer], [], [], _ASK_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        sizes = json.loads(answer.read() or "null")
    os.waitpid(pid, 0)
    if sizes is None:
        raise RuntimeError("the memory of this machine's GPUs is unknown: torch failed to ask for it, or hangs")
    return sizes


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy of an array on a GPU, queued behind its work without waiting for it; on a CPU, the array itself."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
