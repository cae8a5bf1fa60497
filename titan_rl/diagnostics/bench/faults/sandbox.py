"""How many programs the sandbox runs a second, alone and while one slot in ten has nothing but hostile ones.

Blocks with and without them take turns, and neighbours are compared.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.environments.sandbox.pool import Sandbox, check_sandbox
from titan_rl.environments.sandbox.program import Limits, Program, SandboxFailed

_BAR_RATE, _BAR_SHARE = 400.0, 0.9
_SLOTS, _PAIRS, _SECONDS = 10, 7, 3.0
_TRIVIAL = Program("print(6 * 7)")
_BOMBS = (
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "while True: print('x' * 1000)",
    "import time\ntime.sleep(1e6)",
)
_HOSTILE = tuple(Program(source, limits=Limits(seconds=1.0)) for source in _BOMBS)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bench of the sandbox. Errors: ConfigError where no sandbox can be had."""
    check_sandbox()
    return asyncio.run(_measure())


async def _measure() -> list[dict[str, Any]]:
    sandbox, bombs = Sandbox(_SLOTS), itertools.cycle(_HOSTILE)
    try:
        await _block(sandbox, bombs, num_hostile=0)  # which starts the boxes
        blocks = [[await _block(sandbox, bombs, num_hostile=n) for n in (0, 1)] for _ in range(_PAIRS)]
    finally:
        await sandbox.close()
    alone = [first for first, _ in blocks]
    shares = [beside / first for first, beside in blocks]
    return [
        row("programs a second", statistics.median(alone), "1/s", _BAR_RATE, at_most=False, slots=_SLOTS, blocks=alone),
        row(
            *("share of it while one slot in ten is hostile", statistics.median(shares), ""),
            *(_BAR_SHARE, False),
            quartiles=statistics.quantiles(shares),
        ),
    ]


async def _block(sandbox: Sandbox, bombs: Iterator[Program], num_hostile: int) -> float:
    """Trivial programs a second."""
    end = time.perf_counter() + _SECONDS
    counts = await asyncio.gather(
        *(_trivial(sandbox, end) for _ in range(_SLOTS - num_hostile)),
        *(_hostile(sandbox, bombs, end) for _ in range(num_hostile)),
    )
    return sum(counts) / _SECONDS


async def _trivial(sandbox: Sandbox, end: float) -> int:
    done = 0
    while time.perf_counter() < end:
        outcome = await sandbox.run(_TRIVIAL)
        if outcome.stdout != "42\n":
            raise SandboxFailed(f"a trivial program ended with {outcome}")
        done += time.perf_counter() < end
    return done


async def _hostile(sandbox: Sandbox, bombs: Iterator[Program], end: float) -> int:
    while time.perf_counter() < end:
        await sandbox.run(next(bombs))
    return 0
