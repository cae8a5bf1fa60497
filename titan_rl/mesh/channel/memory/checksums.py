"""Which checksum a region's blocks have: that of the memory that they are staged in, wherever they are read to.

Host memory is hashed by xxh3, as fast as it is read. What lies on a GPU should stay there, and has a weighted sum
(kernels/block_sums.py), all blocks in one launch and with one copy to the host.
"""

from typing import Literal

import numpy as np
import torch
import xxhash

Sums = Literal["xxh3", "weighted"]


def sums_for(device: torch.device) -> Sums:
    """Kind of checksum for slots on a device."""
    return "xxh3" if device.type == "cpu" else "weighted"


def checksums(kind: Sums, data: torch.Tensor, blocks: list[tuple[int, int]]) -> np.ndarray:
    """Of uint8 bytes [start, stop) each, as unsigned 64-bit numbers [N]; ``data`` may be on any device."""
    if kind == "xxh3":
        memory = data.cpu().numpy().data
        return np.array([xxhash.xxh3_64_intdigest(memory[start:stop]) for start, stop in blocks], np.uint64)
    from titan_rl.kernels.block_sums import block_sums  # with Triton behind it, which a CPU's run does without

    implementation = "triton" if data.is_cuda else "reference"
    return block_sums(data, blocks, implementation=implementation).cpu().numpy().view(np.uint64)
