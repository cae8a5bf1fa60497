"""How many requests an engine runs at once, by what they will hold in its KV cache.

vLLM admits a request where the cache holds it now. The running ones grow, and when the cache is full the newest is
preempted: its keys and values are dropped, and computed again once it is admitted again. Here a request waits until,
for some steps to come, all are expected to fit. Admitting one computes its tokens, so those steps are half as many as
they are: then what a preemption costs has bought at least so many new tokens.

How long answers go on is estimated from those that have ended: counts alone, so that all ranks of an engine, and
machines of any speed, decide alike.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from titan_rl.compat.vllm.admission import CacheLoad, CacheShape

_WINDOW = 512
"""Answers that are remembered: as training goes on, they become longer or shorter."""
_TIMES = 32
"""Steps to come that are looked at."""


class AdmissionPolicy:
    """Owner of the lengths of past answers, which admits requests by them."""

    def __init__(self, cache: CacheShape):
        self._cache = cache
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._sorted = np.zeros(0, np.int64)

    def ended(self, num_generated: int) -> None:
        """An answer has ended, with so many tokens."""
        self._lengths.append(num_generated)
        self._sorted = np.sort(np.asarray(self._lengths, np.int64))

    def num_admitted(self, running: Sequence[CacheLoad], waiting: Sequence[CacheLoad]) -> int:
        """Number of waiting requests, from the first on, to run beside the running ones; one if none runs."""
        least, most = int(not running and bool(waiting)), len(waiting)
        while least < most:
            middle = (least + most + 1) // 2
            num_steps = max(load.num_tokens for load in waiting[:middle]) // 2
            if self.peak([*running, *waiting[:middle]], num_steps) <= self._cache.num_blocks:
                least = middle
            else:
                most = middle - 1
        return least

    def peak(self, loads: Sequence[CacheLoad], num_steps: int) -> float:
        """Most blocks that requests [R] are expected to hold at one time [T] of so many steps to come."""
        num_tokens_R, num_generated_R, most_R, num_shared_R = np.array(
            [(load.num_tokens, load.num_generated, load.max_new_tokens, load.num_shared) for load in loads]
        ).T
        last = max(min(num_steps, int((most_R - num_generated_R).max())), 1)
        time_T1 = np.unique(np.linspace(0, last - 1, min(last, _TIMES)).astype(np.int64))[:, None]
        runs_TR = self._survival(num_generated_R + time_T1, most_R) / self._survival(num_generated_R, most_R)
        shared_R = self._blocks(num_shared_R)
        own_TR = self._blocks(num_tokens_R + time_T1) - shared_R
        # the blocks of a prompt are held while any of its requests runs
        number_of: dict[bytes | str, int] = {}
        group_R = np.array([number_of.setdefault(load.prompt, len(number_of)) for load in loads])
        _, first_G = np.unique(group_R, return_index=True)
        order = np.argsort(group_R, kind="stable")
        begins_G = np.flatnonzero(np.diff(group_R[order], prepend=-1))
        held_TG = 1 - np.multiply.reduceat(1 - runs_TR[:, order], begins_G, axis=1)
        blocks_T = (runs_TR * own_TR).sum(1) + (held_TG * shared_R[first_G]).sum(1)
        return float(blocks_T.max())

    def _survival(self, length: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Share of answers that are longer: of those that ended, and of one more, as likely as not of any length.

        That one is all there is to go by at first, and beyond the longest answer."""
        longer = len(self._sorted) - np.searchsorted(self._sorted, length, side="right")
        return np.where(length < most, (longer + 1 - length / most) / (len(self._sorted) + 1), 0.0)

    def _blocks(self, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks that requests of so many tokens hold; any shape."""
        blocks = np.zeros_like(num_tokens)
        for size, window in self._cache.groups:
            blocks += -(-(num_tokens if window is None else np.minimum(num_tokens, window)) // size)
        return blocks
