"""No program forges a verdict, escapes, outlives its deadline, or leaves anything to the next one."""

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from boxes import need_boxes
from fake_fusion import FakeFusion
from fake_servers import serving
from hostile_programs import HOSTILE, Hostile

from titan_rl.environments.sandbox.pool import Sandbox
from titan_rl.environments.sandbox.program import Call, Limits, Program, SandboxFailed
from titan_rl.environments.sandbox.remote import RemoteSandbox, remote_config
from titan_rl.environments.sandbox.slot import Slot
from titan_rl.environments.tasks.code.code_tests import FunctionTest, StreamTest, run_tests

LIMITS = Limits(seconds=1.0, memory=192 << 20)
LISTENER = "titan_rl_hidden_tests"
"""The name of a socket of the host's, which the process's number makes its own."""
SLACK = 20.0
"""Seconds behind the limit: a busy machine takes some to end a box, and what is not ended never ends."""
NUMBERS = (3, 10, -2)
TESTS = [FunctionTest(Call("solve", (n,)), n * n + 7) for n in NUMBERS]
SPOKEN = [StreamTest(f"{n}\n", f"{n * n + 7}\n") for n in NUMBERS]
HONEST = """
import sys
def solve(n):
    return n * n + 7
if __name__ == "__main__":
    for line in sys.stdin:
        print(solve(int(line)))
"""
NICE = os.getpriority(os.PRIO_PROCESS, 0)
LOOK_AROUND = f"""
import os, threading
found = [os.listdir("/tmp"), os.listdir("/dev/shm"), os.listdir("/proc"), os.environ.get("LEFT"), os.getpid()]
open("/tmp/mine", "w").write("x")
try:
    os.kill(2, 0)
    found.append("somebody")
except ProcessLookupError:
    pass
import builtins, json
found.append(hasattr(builtins, "left") or hasattr(json, "left"))
found.append(os.nice(0) in ({NICE}, {max(5, NICE)}))
print(found)
"""
UNTOUCHED = "[[], [], [], None, 1, False, True]"
"""The box itself makes a program give way (to 5) that works for long; on a loaded machine that may be this one."""


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """What no program may see: in the environment, in a file that all may read, and behind an abstract socket."""
    token = f"token-{os.urandom(8).hex()}"
    file = tmp_path_factory.mktemp("secret") / "expected.json"
    file.write_text(token)
    os.environ["TITAN_RL_TOKEN"] = token
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{LISTENER}{os.getpid()}")
        server.listen()
        yield token, file
    del os.environ["TITAN_RL_TOKEN"]


def source_of(hostile: Hostile, file: Path) -> str:
    """With what it looks for on this host."""
    found = {"SECRET_FILE": str(file), "HOST_PID": str(os.getpid()), LISTENER: f"{LISTENER}{os.getpid()}"}
    source = hostile.source
    for name, value in found.items():
        source = source.replace(name, value)
    return source


@pytest.fixture(scope="module")
def box():
    """One box, so that what one program leaves the next one would find, and how many processes it has at rest."""
    need_boxes()
    with asyncio.Runner() as runner:
        sandbox = Sandbox(1)
        runner.run(sandbox.run(Program("")))
        [slot] = sandbox._slots
        yield runner, sandbox, len(below(slot._process.pid))
        runner.run(sandbox.close())


def below(pid: int) -> set[int]:
    children = {int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()}
    return children.union(*map(below, children))


def boxed() -> set[int]:
    """Processes of all boxes of this process, which has others as well: servers that the session forks runs from."""

    def is_boxed(pid: int) -> bool:
        try:
            is_elsewhere = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
            return is_elsewhere or Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"
        except OSError:  # it has ended
            return False

    return set(filter(is_boxed, below(os.getpid())))


@pytest.mark.parametrize("name", HOSTILE)
def test_it_earns_nothing_and_leaves_nothing(box, secret, name):
    runner, sandbox, at_rest = box
    hostile: Hostile = HOSTILE[name]
    token, file = secret
    source = source_of(hostile, file)
    runner.run(sandbox.run(Program("")))  # which starts a box where the program before this one took its own with it
    [slot] = sandbox._slots
    others = boxed() - {slot._process.pid} - below(slot._process.pid)
    start = time.monotonic()
    outcome = runner.run(sandbox.run(Program(source, "3\n", tuple(test.call for test in TESTS), LIMITS)))
    seconds = time.monotonic() - start
    assert seconds < LIMITS.seconds + SLACK
    assert token not in repr(outcome), "it saw what it must not"
    if hostile.endings:  # with time enough, on a busy machine as well
        outcome = runner.run(sandbox.run(Program(source, limits=replace(LIMITS, seconds=SLACK))))
        assert outcome.ending in hostile.endings, outcome
    if not hostile.only_runs:
        assert not any(runner.run(run_tests(sandbox, source, TESTS, LIMITS))), "a verdict was forged"
        assert not any(runner.run(run_tests(sandbox, source, SPOKEN, LIMITS))), "a verdict was forged"
    after = runner.run(sandbox.run(Program(LOOK_AROUND)))
    assert after.stdout.strip() == UNTOUCHED, after
    # if it ended slowly, its box is another one now, and the kernel may still be at the end of the former one
    give_up = time.monotonic() + SLACK
    while True:
        inside = below(slot._process.pid)
        beside = boxed() - others - inside - {slot._process.pid}
        if len(inside) <= at_rest and not beside:
            break
        assert time.monotonic() < give_up, f"left: {inside} in the box, {beside} in another"
        time.sleep(0.05)
    assert not slot._process.has_ended and file.read_text() == token


class BoxedFusion(FakeFusion):
    """A server with walls: its scripts run in a box of ours."""

    def __init__(self, slot):
        super().__init__()
        self.slot = slot

    def run(self, body):
        limits = Limits(seconds=body["run_timeout"], memory=1 << 30, processes=48, output=1 << 20)
        done = self.slot.run(Program(body["code"], limits=limits))
        return {"status": "Success", "run_result": {"return_code": done.exit_code, "stdout": done.stdout}}


@pytest.fixture(scope="module")
def server():
    need_boxes()
    slot = Slot()
    with serving(BoxedFusion(slot).app) as port:
        yield {"url": f"http://127.0.0.1:{port}", "patience": 4.0, "at_once": 1}
    slot.close()


@pytest.mark.confirms
@pytest.mark.parametrize("name", HOSTILE)
def test_it_earns_nothing_at_a_server(server, secret, name):
    """What takes over the script that it runs in has no verdict at all."""
    token, file = secret
    source = source_of(HOSTILE[name], file)
    sandbox = RemoteSandbox(remote_config(server))
    for tests in (TESTS, SPOKEN[:1]):
        with suppress(SandboxFailed):
            start = time.monotonic()
            calls = tuple(test.call for test in tests if isinstance(test, FunctionTest))
            outcome = asyncio.run(sandbox.run_once(Program(source, "3\n", calls, LIMITS)))
            assert token not in repr(outcome), "it saw what it must not"
            assert time.monotonic() - start < LIMITS.seconds + SLACK
        with suppress(SandboxFailed):
            assert not any(asyncio.run(run_tests(_Once(sandbox), source, tests, LIMITS))), "a verdict was forged"


@dataclass
class _Once:
    """Without the attempts that only a server's own failures need."""

    sandbox: RemoteSandbox

    async def run(self, program):
        return await self.sandbox.run_once(program)


def test_an_honest_program_passes_at_a_server(server):
    sandbox = RemoteSandbox(remote_config(server))
    assert all(asyncio.run(run_tests(sandbox, HONEST, [*TESTS, *SPOKEN], LIMITS)))


def test_an_honest_program_passes_between_them(box):
    runner, sandbox, _ = box
    assert all(runner.run(run_tests(sandbox, HONEST, [*TESTS, *SPOKEN], LIMITS)))
