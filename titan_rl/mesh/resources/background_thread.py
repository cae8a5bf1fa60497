"""Threads beside the one that computes, which must not share an operator out among threads of their own.

libgomp gives each thread that does so a team, for as long as that thread lives; and once all teams of a process have
more threads than there are cores, none of them spins any more before it sleeps, whatever GOMP_SPINCOUNT says. Each
operator then waits for a thread to wake up: SmolLM2 on two cores, forward and backward, 12.3 s instead of 9.5, and a
decode step of 60 sequences 0.22 s instead of 0.15, because a thread that was done long ago had once filled a buffer.
"""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

from titan_rl.compat.torch.tensors import openmp_library

P = ParamSpec("P")
Result = TypeVar("Result")


_openmp = cache(openmp_library)


def compute_alone() -> None:
    """From now on, the operators that this thread calls run in it alone."""
    torch.get_num_threads()  # a thread takes the process's number at its first operator: let that have been
    _openmp().omp_set_num_threads(1)


async def in_side_thread(work: Callable[P, Result], *arguments: P.args, **keywords: P.kwargs) -> Result:
    """As ``asyncio.to_thread``, which keeps its threads."""

    def alone() -> Result:
        compute_alone()
        return work(*arguments, **keywords)

    return await asyncio.to_thread(alone)
