"""Task ``swe`` on a file of a test's own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.registry import make_task
from titan_rl.environments.tasks.swe.swe_task import SweTask

Check = Callable[[SweTask, Prompt], Awaitable[None]]


def with_swe_task(folder: Path, check: Check, style: str = "chat", **options) -> None:
    """Let a coroutine have the task and its first prompt. ``folder``: below which files and workspaces are."""

    async def run() -> None:
        task = make_task(TaskConfig(name="swe", style=style, options=options), [str(folder)])
        assert isinstance(task, SweTask)
        try:
            await check(task, task.prompt("train", 1, 0))
        finally:
            await task.close()

    asyncio.run(run())
