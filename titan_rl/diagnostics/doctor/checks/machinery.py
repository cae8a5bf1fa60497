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
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.environments.interfaces.task import parts_of
from titan_rl.environments.interfaces.tool import schema_of
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


async def deadline(context: CheckContext) -> str:
    """A score that never comes is given up in time, and a right answer's comes long before."""
    config = context.checked.config
    if config.data.file:
        raise CheckSkipped("a run on data.file scores nothing")
    task = TaskConfig(name="calculator", reward=_HANGING)
    scorer, start = Scorer(task, [], _TIMEOUT, 2), 0.0
    await scorer.start()
    try:
        start = time.monotonic()
        scoring = scorer.score(make_task(task).prompt("doctor", 1, 0), [["6"]])
        [score], _ = await within(_TIMEOUT + _GRACE, "a score that hangs", scoring)
    except DeadlineError:
        waited = time.monotonic() - start
        raise CheckFailed(
            "an answer that hangs its scorer is not given up", f"{waited:.1f} s for {_TIMEOUT} s"
        ) from None
    finally:
        await scorer.close()
    if score.status != "timeout":
        raise CheckFailed("an answer that hangs its scorer is no timeout", f"it is {score.status}: {score.message}")
    summary = f"an answer that hangs was given up after {time.monotonic() - start:.1f} s, of {_TIMEOUT:g} s"
    try:
        seconds = (await context.earned()).seconds
    except (CheckSkipped, CheckFailed):
        return summary
    limit = config.verifier.score_timeout
    if seconds > _MOST_OF_IT * limit:
        evidence = f"the slowest took {seconds:.2f} s, verifier.score_timeout = {limit:g}"
        raise CheckFailed("right answers are scored so slowly that a busy machine will give them up", evidence)
    return f"{summary}; the slowest right answer took {seconds:.2f} of {limit:g} s to score"


# walls


async def sandbox(context: CheckContext) -> str:
    """Programs cannot reach the network, this machine's files or each other, and end at their limits."""
    config = context.checked.config
    if not _runs_code(context):
        raise CheckSkipped("the task runs no code that a model wrote")
    if config.task.sandbox:
        raise CheckSkipped(f"programs run at {config.task.sandbox.get('url')}, whose walls are its own to hold")
    for what, look in _WALLS.items():
        if leak := await look():
            raise CheckFailed(f"the sandbox does not hold: a program can {what}", leak)
    return f"{len(_WALLS)} walls: no program can {', '.join(_WALLS)}"


def _runs_code(context: CheckContext) -> bool:
    if any(task.name == "code" for task in all_tasks(context.checked.config.task).values()):
        return True
    tools = [schema_of(tool) for part in parts_of(context.checked.task) for tool in part.tools]
    return any(tool["function"]["name"] == "python" for tool in tools)


async def _run(source: str, *, seconds: float = 5.0, memory: int = Limits.memory) -> Outcome:
    return await shared_sandbox().run(Program(source, limits=Limits(seconds=seconds, memory=memory)))


async def _network() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = await _run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('reached')")
    return f"it reached 127.0.0.1:{port}" if "reached" in result.stdout else ""


async def _files() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="titan_rl_doctor_") as file:
        file.write("secret of the host")
        file.flush()
        os.chmod(file.name, 0o644)
        result = await _run(f"print(open({file.name!r}).read())")
    return f"it read {file.name}" if "secret" in result.stdout else ""


async def _environment() -> str:
    result = await _run("import os; print(sorted(os.environ))")
    leaked = [name for name in ("HOME", "PATH", "PYTHONPATH") if repr(name) in result.stdout]
    return f"it saw {', '.join(leaked)}" if leaked else ""


async def _each_other() -> str:
    await _run("open('/tmp/left', 'w').write('x')")
    result = await _run("import os; print(os.path.exists('/tmp/left'))")
    return "a later one found its file" if "True" in result.stdout else ""


async def _for_ever() -> str:
    try:
        result = await within(0.5 + _GRACE, "a program without end", _run("while True: pass", seconds=0.5))
    except DeadlineError as error:
        return str(error)
    return "" if result.ending == "timeout" else f"a loop without end ended as {result.ending}"


async def _memory() -> str:
    result = await _run("x = bytearray(1 << 30); print(len(x))", memory=64 << 20)
    return "it had 1 GiB of 64 MiB" if str(1 << 30) in result.stdout else ""


_WALLS: dict[str, Callable[[], Awaitable[str]]] = {
    "reach the network": _network,
    "read this machine's files": _files,
    "see its environment": _environment,
    "leave something to the next": _each_other,
    "run for ever": _for_ever,
    "take all memory": _memory,
}


# memory


async def memory(context: CheckContext) -> str:
    """Memory of all processes against the plan, and the plan against the machine."""
    checked = context.checked
    if DEVICE_TYPE != "cpu":
        return await _device_memory(context)
    if checked.config.mesh.launcher != "local":
        raise CheckSkipped("hosts of a launcher of your own have memory of their own")
    needs, limit = memory_needs(checked), memory_limit()
    planned = held_at_once(checked.config, needs)
    if planned > limit:
        evidence = f"{planned / GIB:.1f} GiB of {limit / GIB:.1f}: {'; '.join(map(str, needs))}"
        raise CheckFailed("the run does not fit into this machine's memory", evidence)
    usage = await asyncio.to_thread(_held, {**context.actors.meshes.pids, os.getpid(): "controller"})
    total = sum(usage.values())
    summary = f"{planned / GIB:.1f} GiB planned of {limit / GIB:.1f}, {total / GIB:.1f} held now"
    if total > _BEYOND * planned + _ROOM:
        evidence = f"{summary}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in usage.items())
        raise CheckFailed("the run holds more memory than was planned", evidence)
    return summary


def _held(pids: dict[int, str]) -> dict[str, float]:
    """Bytes by kind of process, of pages that several share its part."""
    usage: dict[str, float] = {}
    for pid, name in pids.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended, or is another user's
            continue
        size = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        kind = name.split()[0]
        usage[kind] = usage.get(kind, 0.0) + size
    return usage


async def _device_memory(context: CheckContext) -> str:
    """Of GPUs: their placement was planned before anything started, and is held to here."""
    answers = await context.actors.ask_trainer(probes.device_bytes)
    used, has = max(answers)
    if used > context.checked.config.generator.gpu_memory_utilization * has:
        raise CheckFailed(
            "a trainer rank holds more of its GPU than it may", f"{used / GIB:.1f} of {has / GIB:.1f} GiB"
        )
    return f"a trainer rank held {used / GIB:.1f} of {has / GIB:.1f} GiB at the most"
