"""Bench of an interactive run: cost of steps on request, and response time of calls."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.controller.interactive.launch import launch
from titan_rl.controller.interactive.live import LiveSession
from titan_rl.diagnostics.bench.harness import row

_BAR_STEP_MS, _BAR_LOOK = 5.0, 0.5
_WARMING, _PAIRS, _LOOKS = 5, 120, 40
_OVERRIDES = {
    "training": {"steps": _WARMING + 2 * _PAIRS + 30},
    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_staleness": 0},
    "recovery": {"standby": False},
    "eval": {"every": 0, "prompts": 32},
    "sft": {"steps": 20},
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    sections = {name: _OVERRIDES.get(name, {}) | overrides.get(name, {}) for name in _OVERRIDES | overrides}
    with redirect_stdout(sys.stderr):  # what the run says is no row
        return asyncio.run(_measure(sections))


async def _measure(sections: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        sections = sections | {"run": sections.get("run", {}) | {"dir": str(Path(folder) / "run")}}
        async with launch("quickstart", resume=False, **sections) as session:
            await session.step(_WARMING)
            by_session, beside, own = await _both_loops(session)
            session.run()
            looks = {
                "session.actors": lambda: session.actors,
                "session.metrics": lambda: session.metrics,
                "session.rollouts(step)": lambda: session.rollouts(_WARMING),
            }
            slowest = {name: await _slowest(look) for name, look in looks.items()}
    more, error = float((by_session - own).mean()), float((by_session - own).std(ddof=1) / len(own) ** 0.5)
    return [
        row("session.step() beside the loop's own step, in it", 1000 * float(np.median(beside)), "ms", _BAR_STEP_MS),
        row("the same against such steps in turn", 1000 * more, "ms", standard_error=1000 * error),
        row("the loop's own step", float(np.median(own)), "s"),
        *(
            row(f"{name} while it trains, slowest of {_LOOKS}", value, "s", _BAR_LOOK)
            for name, value in slowest.items()
        ),
    ]


async def _both_loops(session: LiveSession) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of pairs of steps: one that is asked for, what of it was not the loop's, and one of the loop's own."""
    run, within = session.session, []
    step, reported = run.step, run.reported

    async def own_step() -> None:
        await step()
        await reported()

    async def timed(work: Callable[[], Awaitable[Any]]) -> None:
        within.append(await _seconds(work))

    async def timed_step(count: int = 1) -> None:
        await timed(lambda: step(count))

    run.step, run.reported = timed_step, (lambda: timed(reported))
    pairs = [(await _seconds(session.step), await _seconds(own_step)) for _ in range(_PAIRS)]
    del run.step, run.reported  # the class's again
    by_session, own = np.array(pairs).T
    return by_session, by_session - np.array(within).reshape(_PAIRS, 2).sum(axis=1), own


async def _seconds(work: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def _slowest(look: Callable[[], Any]) -> float:
    """Seconds, of looks at random moments of some steps."""
    durations = []
    for _ in range(_LOOKS):
        await asyncio.sleep(0.05)
        start = time.perf_counter()
        look()
        durations.append(time.perf_counter() - start)
    return max(durations)
