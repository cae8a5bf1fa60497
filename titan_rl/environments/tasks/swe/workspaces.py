"""Workspaces of a prompt's samples, and those that a setup has prepared to be forked for them."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from titan_rl.environments.sandbox.workspace.command import Workspace

_MOST_PREPARED = 8
"""That are kept while no sample is forked from them."""


@dataclass(frozen=True)
class Workspaces:
    """Workspaces of a prompt. Errors of both: SandboxFailed; ConfigError."""

    open: Callable[[int | None], Awaitable[Workspace]]
    """Opens one; with a port, at which it listens for the host."""
    evaluate: Callable[[Workspace], Awaitable[float]]
    """Reward of what is in one."""


@dataclass
class _Prepared:
    workspace: asyncio.Task[Workspace]
    num_waiting: int = 0
    """Samples that are to be forked from it now."""


class PreparedWorkspaces:
    """Owner of prepared workspaces, by prompts."""

    def __init__(self) -> None:
        self._prepared: OrderedDict[str, _Prepared] = OrderedDict()

    async def fork(self, prompt: str, prepare: Callable[[], Awaitable[Workspace]], port: int | None) -> Workspace:
        """Fork of a prompt's workspace, which is prepared for the first of them.

        Errors: SandboxFailed, after which it is prepared again; what preparing raises."""
        if prompt not in self._prepared:
            self._prepared[prompt] = _Prepared(asyncio.ensure_future(prepare()))
        self._prepared.move_to_end(prompt)
        prepared = self._prepared[prompt]
        prepared.num_waiting += 1
        try:
            return await (await asyncio.shield(prepared.workspace)).fork(port)
        except Exception:
            if self._prepared.get(prompt) is prepared:
                await _close(self._prepared.pop(prompt))
            raise
        finally:
            prepared.num_waiting -= 1
            await self._close_oldest()

    async def _close_oldest(self) -> None:
        idle = [prompt for prompt, each in self._prepared.items() if not each.num_waiting and each.workspace.done()]
        oldest = [self._prepared.pop(prompt) for prompt in idle[: max(0, len(self._prepared) - _MOST_PREPARED)]]
        for prepared in oldest:
            await _close(prepared)

    def cancel(self) -> None:
        """Cancel what is being prepared; the server of workspaces ends the others."""
        for prepared in self._prepared.values():
            prepared.workspace.cancel()


async def _close(prepared: _Prepared) -> None:
    """Close a workspace, if preparing it has not failed."""
    if prepared.workspace.done() and not prepared.workspace.cancelled() and prepared.workspace.exception() is None:
        await prepared.workspace.result().close()
