"""How many commands workspaces run a second, and what it takes to open, to fork and to close one.

Each of several workspaces runs one command after the other. A fork is of a workspace in which something was written.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command
from titan_rl.environments.sandbox.workspace.images import image_of_files
from titan_rl.environments.sandbox.workspace.server import BoxWorkspace, WorkspaceServer, check_workspaces

_BAR_RATE, _BAR_FORK_MS = 100.0, 50.0
_WORKSPACES, _BLOCKS, _SECONDS, _FORKS = 4, 5, 2.0, 40
_COMMAND = Command("echo a line >> notes.txt && tail -n 1 notes.txt")


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bench of workspaces. Errors: ConfigError where none can be had."""
    check_workspaces()
    return asyncio.run(_measure())


async def _measure() -> list[dict[str, Any]]:
    server, image = WorkspaceServer(), image_of_files({"notes.txt": b"", **{f"m{n}.py": b"x = 1\n" for n in range(50)}})
    try:
        opened = [await _timed(lambda: server.open(image)) for _ in range(_WORKSPACES)]
        workspaces = [workspace for workspace, _ in opened]
        rates = [await _block(workspaces) for _ in range(_BLOCKS)]
        forked = [await _timed(workspaces[0].fork) for _ in range(_FORKS)]
        closed = [(await _timed(workspace.close))[1] for workspace, _ in forked]
    finally:
        await server.close()
    return [
        row("commands a second", statistics.median(rates), "1/s", _BAR_RATE, at_most=False, workspaces=_WORKSPACES),
        row(
            "a fork", statistics.median(ms for _, ms in forked), "ms", _BAR_FORK_MS, slowest=max(ms for _, ms in forked)
        ),
        row("to open one", statistics.median(ms for _, ms in opened[1:]), "ms", first=opened[0][1]),
        row("to close one", statistics.median(closed), "ms"),
    ]


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    """Result, and milliseconds."""
    start = time.perf_counter()
    return await work(), 1e3 * (time.perf_counter() - start)


async def _block(workspaces: list[BoxWorkspace]) -> float:
    """Commands a second."""
    end = time.perf_counter() + _SECONDS

    async def runs(workspace: BoxWorkspace) -> int:
        done = 0
        while time.perf_counter() < end:
            result = await workspace.run(_COMMAND)
            if result.output != "a line\n":
                raise SandboxFailed(f"a command ended with {result}")
            done += 1
        return done

    return sum(await asyncio.gather(*map(runs, workspaces))) / _SECONDS
