"""What an episode needs besides its model dies in the middle of it: a tool's server, a sandbox, a judge. It is tried
again, then the group is, then it is discarded by name: it is never a wrong answer, and the run goes on."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import running
from boxes import need_boxes
from running import STEPS
from tree import SUPPORT

from titan_rl.records.ledger.audit import flaws, read
from titan_rl.records.ledger.ledger import read_account
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts, recorded_steps

DISCARDED, ALONE = "discarded (infra_error)", "discarded (no_peers)"
"""Samples that met a failure, and one that it left alone in its group."""
TASK = """
import os

import httpx

from titan_rl.environments.tasks.calculator import CalculatorTask
from titan_rl.environments.tasks.python_tool import python_tool
from titan_rl.environments.conversation.tools import ToolEnvironment
from titan_rl.environments.interfaces.tool import Tool

NOTHING = {"type": "object", "properties": {"about": {"type": "string"}}, "required": ["about"]}


async def ask(about: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        reply = await client.post("http://127.0.0.1:PORT/tool", json={})
        return reply.raise_for_status().text


class BothTools(ToolEnvironment):
    '''Calls them itself, whatever the model says.'''

    calls = ["ask(it)", "python(print(7))"]

    async def step(self, answer):
        self.number = getattr(self, "number", -1) + 1
        return await super().step(self.calls[self.number] if self.number < len(self.calls) else "7")


class Asks(CalculatorTask):
    def __init__(self, task):
        super().__init__(task)
        self.tools = [Tool("ask", "", NOTHING, ask), python_tool()]

    def environment(self, prompt):
        return BothTools(self.tools, "compact")
"""


class Outside:
    """The servers' process; dead between ``kill`` and ``start``."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SUPPORT / "hosts" / "outside_servers.py", str(self.port), "0.2"]
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def outside():
    servers = Outside()
    servers.start()
    yield servers
    servers.kill()


def wait_for_a_discarded_group(root: Path) -> None:
    deadline = time.monotonic() + 120
    while not read(RunDir(root).ledger, read_account).get(DISCARDED):
        assert time.monotonic() < deadline, f"every retry outlasts it: {running.output(root)[-2000:]}"
        time.sleep(0.2)


def kill_boxes(run: int) -> int:
    """Whatever of the sandbox's walls is there now; how many."""
    killed = 0
    for pid in set().union(*map(running.below, running.descendants(run))):
        if running.command_line(pid).partition(" ")[0].endswith("bwrap"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


@pytest.mark.slow
@pytest.mark.waits
def test_what_dies_outside_is_no_wrong_answer(tmp_path, outside):
    need_boxes()
    (tmp_path / "asks.py").write_text(TASK.replace("PORT", str(outside.port)))
    judge = {"url": f"http://127.0.0.1:{outside.port}/v1", "model": "any", "seconds": 4.0}
    settings = {f"task__judge__{name}": value for name, value in judge.items()} | {"task__options": "{ digits = 2 }"}
    root = tmp_path / "run"
    process = running.start(
        root,
        *("--run.plugin_path", f"['{tmp_path}']"),
        **dict(
            task__name="asks:Asks",
            task__reward="judge",
            sft__steps=30,
            sft__examples_per_step=16,
            rollout__max_new_tokens=16,
            training__steps=3 * STEPS,
            eval__prompts=4,
        )
        | settings,
    )
    boxes = 0
    try:
        for step, wait in ((2, lambda: time.sleep(0.3)), (5, lambda: wait_for_a_discarded_group(root))):
            running.wait_for_step(root, step, timeout=180)
            outside.kill()
            boxes += kill_boxes(process.pid)
            wait()  # retries outlast the first, and not the second
            outside.start()
        running.wait_for_step(root, 9, timeout=180)
        boxes += kill_boxes(process.pid)
        assert process.wait(240) == 0, running.output(root)[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rollouts = [r for step in recorded_steps(RunDir(root).rollouts) for r in _of(root, step)]
    assert len(rollouts) == 3 * STEPS * 16
    assert {r.reward for r in rollouts if r.status in ("ok", "truncated")} == {1.0}
    assert {r.status for r in rollouts} <= {"ok", "truncated", "infra_error"}
    assert max(len(r.turns) for r in rollouts) == 3 and boxes
    assert not flaws(RunDir(root).ledger)
    account = read(RunDir(root).ledger, read_account)
    assert set(account) - {ALONE} == {"issued", "trained", "pending", DISCARDED} and not account["pending"]
    assert "tool ask failed 3 times: ConnectError" in running.output(root)


def _of(root: Path, step: int):
    return [rollout for group in read_rollouts(RunDir(root).rollouts, step) for rollout in group.rollouts]
