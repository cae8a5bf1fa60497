"""Boxes for many callers: a program takes one that is free, or waits for one."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.groups import place
from titan_rl.environments.sandbox.program import Limits, Outcome, Program, Runner, SandboxFailed
from titan_rl.environments.sandbox.slot import Slot
from titan_rl.mesh.launch.placement import available_cores

_ATTEMPTS = 3
_SLOTS_OF_A_CORE = 4
"""Most of a short program's time is the kernel's, who makes and ends its namespaces beside others."""
_MEND = (
    "apt-get install bubblewrap libseccomp2, and let users make namespaces (sysctl kernel.unprivileged_userns_clone=1)"
)


class Sandbox:
    """Owns the boxes. Each is started by its first program."""

    def __init__(self, num_slots: int | None = None):
        count = num_slots or _SLOTS_OF_A_CORE * available_cores()
        self._free: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()  # the warmest first
        self._slots = [Slot() for _ in range(count)]
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._threads = ThreadPoolExecutor(count, "sandbox")

    async def run(self, program: Program) -> Outcome:
        """Whatever the program does, this ends a second after ``limits.seconds`` at the latest, not counting the wait
        for a box. Errors: SandboxFailed, after it was tried in other boxes."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._run_once(program)
            except SandboxFailed:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("a program is tried once at least")

    async def _run_once(self, program: Program) -> Outcome:
        slot = await self._free.get()
        running = asyncio.get_running_loop().run_in_executor(self._threads, slot.run, program)
        # also when the caller is cancelled: the box is free when the program in it has ended
        running.add_done_callback(lambda _: self._free.put_nowait(slot))
        return await asyncio.shield(running)

    async def close(self) -> None:
        """Programs under way end first."""
        await asyncio.to_thread(self._threads.shutdown)
        for slot in self._slots:
            slot.close()


@dataclass
class _Choice:
    """Where this process's programs run."""

    server: dict[str, Any] = field(default_factory=dict)
    """``[task.sandbox]``; empty: in boxes here."""


_chosen = _Choice()


def choose_sandbox(server: dict[str, Any]) -> None:
    """For this process, from now on, by ``[task.sandbox]``. Errors: ConfigError."""
    if server:
        from titan_rl.environments.sandbox.remote import remote_config  # httpx takes a tenth of a second

        remote_config(server)
    _chosen.server = dict(server)


def shared_sandbox() -> Runner:
    """This process's."""
    return _remote(json.dumps(_chosen.server)) if _chosen.server else _boxes()


@cache
def _boxes() -> Sandbox:
    """They end with the process, whatever ends that."""
    return Sandbox()


@cache
def _remote(server: str) -> Runner:
    from titan_rl.environments.sandbox.remote import RemoteSandbox, remote_config

    return RemoteSandbox(remote_config(json.loads(server)))


def bounds_of_boxes() -> str | None:
    """What bounds programs' memory and processes on this machine; None where this process has looked for no boxes."""
    return str(place()) if _check_boxes.cache_info().currsize else None


def check_sandbox() -> None:
    """Errors: ConfigError with the mend where no sandbox can be had: nothing is ever run without. A server is asked
    once, before the run (remote.py); later each program finds out whether it is there."""
    if not _chosen.server:
        _check_boxes()


@cache
def _check_boxes() -> None:
    slot = Slot()
    try:
        outcome = slot.run(Program("print(6 * 7)", limits=Limits(seconds=20.0)))
        if (outcome.ending, outcome.stdout) != ("ok", "42\n"):
            raise SandboxFailed(outcome.stderr.strip() or outcome.ending)
    except SandboxFailed as error:
        raise ConfigError(f"code that a model wrote cannot be run safely here: {error}; {_MEND}") from None
    finally:
        slot.close()
