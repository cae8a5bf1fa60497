"""Launcher for torchrun: rank 0 is the controller, every other rank a worker loop.

They meet in the folder that torchrun made for this start, which only their owner may enter; torchrun's own store is a
TCP port that any user of the host may write to. Each process puts its id there. When the run starts its actors, rank 0
puts beside it what each other rank needs: an address to listen at, and the folder of the run's sockets.

Only rank 0 decides when a rank ends: it ignores signals and goes as soon as rank 0 is gone, so that a run that is
stopped can be saved. torchrun ends the job if any of them dies before.
"""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from titan_rl.config.torchrun import World, forget
from titan_rl.mesh.processes.logs import send_output_to

_MEETING_SECONDS = 60.0
"""torchrun starts all at once; what passes between is Python's start."""
_POLL_SECONDS = 0.02


class RankMissing(RuntimeError):
    """Missing process of torchrun."""


def announce(world: World) -> None:
    """Announce this process to rank 0."""
    _put(_process_file(world, world.rank), os.getpid())


class OtherRanks:
    """Other processes of torchrun, which rank 0 turns into hosts."""

    def __init__(self, world: World):
        self._world = world
        self.starter = os.getppid()
        """torchrun's process id."""

    @property
    def count(self) -> int:
        return self._world.size - 1

    def engage(self, rank: int, address: str, environment: Mapping[str, str], log: tuple[str | None, str]) -> int:
        """Have a rank listen at an address, with these variables besides its own, and print to that log (its folder
        and name). Its process id. Errors: RankMissing."""
        pid = _wait_for(_process_file(self._world, rank), f"torchrun's rank {rank} has not come to its first line")
        _put(_word_file(self._world, rank), {"address": address, "environment": dict(environment), "log": log})
        return pid


def serve(world: World, listen: Callable[[str], Any]) -> NoReturn:
    """Another rank's whole life: to wait, to be a host, and to end with rank 0.

    ``listen(address)``: the worker loop, which does not return. Errors: RankMissing.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which actors would inherit
    controller = _wait_for(_process_file(world, 0), "rank 0 has not come to its first line")
    try:
        descriptor = os.pidfd_open(controller)
    except ProcessLookupError:
        _end()
    word = _word(world, descriptor)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    forget(os.environ)
    os.environ |= word["environment"]
    send_output_to(*word["log"])
    listen(word["address"])
    raise RuntimeError("the worker loop has ended before its run")


def _word(world: World, controller: int) -> dict[str, Any]:
    """What rank 0 wants of this one; if it ends without, so does this one."""
    while (word := _get(_word_file(world, world.rank))) is None:
        if select.select([controller], [], [], _POLL_SECONDS)[0]:
            _end()
    return word


def _end_with(controller: int) -> None:
    select.select([controller], [], [])
    _end()


def _end() -> NoReturn:
    """torchrun tells how rank 0 ended; this rank has nothing to add. At once: torchrun's SIGTERM is on its way, and
    Python would handle signals no more while it ends."""
    os._exit(0)


def _process_file(world: World, rank: int) -> Path:
    return world.attempt / f"titan_rl_rank_{rank}.json"


def _word_file(world: World, rank: int) -> Path:
    return world.attempt / f"titan_rl_word_{rank}.json"


def _put(path: Path, value: Any) -> None:
    """It appears whole."""
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def _get(path: Path) -> Any:
    with suppress(FileNotFoundError):
        return json.loads(path.read_text())
    return None


def _wait_for(path: Path, missing: str) -> Any:
    deadline = time.monotonic() + _MEETING_SECONDS
    while (value := _get(path)) is None:
        if time.monotonic() > deadline:
            raise RankMissing(f"{missing} within {_MEETING_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    return value
