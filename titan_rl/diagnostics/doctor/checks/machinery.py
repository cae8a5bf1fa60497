"""The machinery around a run: deadlines, walls, memory."""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.controller.planning.memory_plan import GIB, held_at_once, memory_limit, memory_needs
from titan_rl.diagnostics.doctor.context import Visit
from titan_rl.diagnostics.doctor.findings import NotLookedAt, Wrong
from titan_rl.diagnostics.doctor.probes import actors as probes
from titan_rl.environments.conversation.tools import schema_of
from titan_rl.environments.interfaces.task import parts_of
from titan_rl.environments.registry import make_task
from titan_rl.environments.sandbox.pool import shared_sandbox
from titan_rl.environments.sandbox.program import Limits, Outcome, Program
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.mesh.processes.deadlines import DeadlineError, within
from titan_rl.models.device import DEVICE_TYPE

_TIMEOUT, _GRACE = 0.5, 6.0
"""Seconds that a scorer is given for an answer that hangs, and how much later its word may come on a busy machine."""
_MOST_OF_IT = 0.5
"""Share of verifier.score_timeout that a right answer may take."""
_HANGING = "titan_rl.diagnostics.doctor.checks.hanging_reward:reward"
_BEYOND = 1.25
"""What may be held, over what was planned."""
_ROOM = 0.5 * GIB


# deadlines


async def deadline(visit: Visit) -> str:
    """A score that never comes is given up in time, and a right answer's comes long before."""
    config = visit.checked.config
    if config.data.file:
        raise NotLookedAt("a run on data.file scores nothing")
    task = TaskConfig(name="calculator", reward=_HANGING)
    scorer, start = Scorer(task, [], _TIMEOUT, 2), 0.0
    await scorer.start()
    try:
        start = time.monotonic()
        scoring = scorer.score(make_task(task).prompt("doctor", 1, 0), [["6"]])
        [score], _ = await within(_TIMEOUT + _GRACE, "a score that hangs", scoring)
    except DeadlineError:
        waited = time.monotonic() - start
        raise Wrong("an answer that hangs its scorer is not given up", f"{waited:.1f} s for {_TIMEOUT} s") from None
    finally:
        await scorer.close()
    if score.status != "timeout":
        raise Wrong("an answer that hangs its scorer is no timeout", f"it is {score.status}: {score.message}")
    told = f"an answer that hangs was given up after {time.monotonic() - start:.1f} s, of {_TIMEOUT:g} s"
    try:
        seconds = (await visit.earned()).seconds
    except (NotLookedAt, Wrong):
        return told
    limit = config.verifier.score_timeout
    if seconds > _MOST_OF_IT * limit:
        evidence = f"the slowest took {seconds:.2f} s, verifier.score_timeout = {limit:g}"
        raise Wrong("right answers are scored so slowly that a busy machine will give them up", evidence)
    return f"{told}; the slowest right answer took {seconds:.2f} of {limit:g} s to score"


# walls


async def sandbox(visit: Visit) -> str:
    """Programs cannot reach the network, this machine's files or each other, and end at their limits."""
    config = visit.checked.config
    if not _runs_code(visit):
        raise NotLookedAt("the task runs no code that a model wrote")
    if config.task.sandbox:
        raise NotLookedAt(f"programs run at {config.task.sandbox.get('url')}, whose walls are its own to hold")
    for what, look in _WALLS.items():
        if said := await look():
            raise Wrong(f"the sandbox does not hold: a program can {what}", said)
    return f"{len(_WALLS)} walls: no program can {', '.join(_WALLS)}"


def _runs_code(visit: Visit) -> bool:
    if any(task.name == "code" for task in all_tasks(visit.checked.config.task).values()):
        return True
    tools = [schema_of(tool) for part in parts_of(visit.checked.task) for tool in part.tools]
    return any(tool["function"]["name"] == "python" for tool in tools)


async def _run(source: str, *, seconds: float = 5.0, memory: int = Limits.memory) -> Outcome:
    return await shared_sandbox().run(Program(source, limits=Limits(seconds=seconds, memory=memory)))


async def _network() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = await _run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('reached')")
    return f"it reached 127.0.0.1:{port}" if "reached" in told.stdout else ""


async def _files() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="titan_rl_doctor_") as file:
        file.write("secret of the host")
        file.flush()
        os.chmod(file.name, 0o644)
        told = await _run(f"print(open({file.name!r}).read())")
    return f"it read {file.name}" if "secret" in told.stdout else ""


async def _environment() -> str:
    told = await _run("import os; print(sorted(os.environ))")
    leaked = [name for name in ("HOME", "PATH", "PYTHONPATH") if repr(name) in told.stdout]
    return f"it saw {', '.join(leaked)}" if leaked else ""


async def _each_other() -> str:
    await _run("open('/tmp/left', 'w').write('x')")
    told = await _run("import os; print(os.path.exists('/tmp/left'))")
    return "a later one found its file" if "True" in told.stdout else ""


async def _for_ever() -> str:
    try:
        told = await within(0.5 + _GRACE, "a program without end", _run("while True: pass", seconds=0.5))
    except DeadlineError as error:
        return str(error)
    return "" if told.ending == "timeout" else f"a loop without end ended as {told.ending}"


async def _memory() -> str:
    told = await _run("x = bytearray(1 << 30); print(len(x))", memory=64 << 20)
    return "it had 1 GiB of 64 MiB" if str(1 << 30) in told.stdout else ""


_WALLS: dict[str, Callable[[], Awaitable[str]]] = {
    "reach the network": _network,
    "read this machine's files": _files,
    "see its environment": _environment,
    "leave something to the next": _each_other,
    "run for ever": _for_ever,
    "take all memory": _memory,
}


# memory


async def memory(visit: Visit) -> str:
    """What processes hold is no more than was planned, and what was planned fits."""
    checked = visit.checked
    if DEVICE_TYPE != "cpu":
        return await _device_memory(visit)
    if checked.config.mesh.launcher != "local":
        raise NotLookedAt("hosts of a launcher of your own have memory of their own")
    needs, limit = memory_needs(checked), memory_limit()
    planned = held_at_once(checked.config, needs)
    if planned > limit:
        evidence = f"{planned / GIB:.1f} GiB of {limit / GIB:.1f}: {'; '.join(map(str, needs))}"
        raise Wrong("the run does not fit into this machine's memory", evidence)
    held = await asyncio.to_thread(_held, {**visit.patient.meshes.pids, os.getpid(): "controller"})
    whole = sum(held.values())
    seen = f"{planned / GIB:.1f} GiB planned of {limit / GIB:.1f}, {whole / GIB:.1f} held now"
    if whole > _BEYOND * planned + _ROOM:
        evidence = f"{seen}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items())
        raise Wrong("the run holds more memory than was planned", evidence)
    return seen


def _held(pids: dict[int, str]) -> dict[str, float]:
    """Bytes by kind of process, of pages that several share its part."""
    found: dict[str, float] = {}
    for pid, name in pids.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended, or is another user's
            continue
        size = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        kind = name.split()[0]
        found[kind] = found.get(kind, 0.0) + size
    return found


async def _device_memory(visit: Visit) -> str:
    """Of GPUs: their placement was planned before anything started, and is held to here."""
    answers = await visit.patient.ask_trainer(probes.device_bytes)
    held, has = max(answers)
    if held > visit.checked.config.generator.gpu_memory_utilization * has:
        raise Wrong("a trainer rank holds more of its GPU than it may", f"{held / GIB:.1f} of {has / GIB:.1f} GiB")
    return f"a trainer rank held {held / GIB:.1f} of {has / GIB:.1f} GiB at the most"
