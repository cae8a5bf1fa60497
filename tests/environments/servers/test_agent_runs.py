"""An agent of the user's own is trained through real actors, also when a generator dies in the middle of episodes."""

import os
import signal
from collections import Counter

import numpy as np
import pytest
import running
from faults import strike
from running import STEPS

from titan_rl.data.types import Provenance
from titan_rl.records.ledger.audit import flaws, read
from titan_rl.records.ledger.ledger import read_account
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

TASK = """
import asyncio
import os

import openai

from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.reasoning_gym.task import ReasoningGymTask


class TwoTries:
    '''Asks, looks, and asks once more from the same place; the better answer counts.'''

    timeout = 60

    def __init__(self, task, prompt):
        self.task, self.prompt = task, prompt

    async def run(self, model):
        begun = os.open(__file__ + ".begun", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(begun, (self.prompt.id + "\\n").encode())
        os.close(begun)
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            first = await self.said(client, self.prompt.text)
            await asyncio.sleep(0.2)  # so that some are always in the middle
            tries = [await self.said(client, f"{self.prompt.text}{first}=") for _ in range(2)]
        return max(sum(self.task.score(self.prompt, [said]).values()) for said in (first, *tries))

    async def said(self, client, text):
        answered = await client.completions.create(model=model_name(client), prompt=text, max_tokens=4)
        return answered.choices[0].text


def model_name(client):
    return "policy"


class Task:
    def __init__(self, task):
        self.gcd = ReasoningGymTask(TaskConfig(name="gcd", options=task.options))

    def __getattr__(self, name):
        if name in ("environment", "reply", "tools", "sessions", "speaks_first"):
            raise AttributeError(name)
        return getattr(self.gcd, name)

    def prompt(self, stream, seed, index):
        return self.gcd.prompt(stream, seed, index)

    def messages(self, prompt):
        return self.gcd.messages(prompt)

    def demonstration(self, prompt):
        return self.gcd.demonstration(prompt)

    def score(self, prompt, answers):
        return {"said": 0.0}

    def agent(self, prompt):
        return TwoTries(self.gcd, prompt)
"""


@pytest.mark.slow
def test_an_agent_is_trained_on_what_it_was_answered(tmp_path):
    """Those in the middle at a generator's death go on at another, and begin no second time."""
    (tmp_path / "tries.py").write_text(TASK)
    root = tmp_path / "run"
    flags = "--run.plugin_path", f"['{tmp_path}']"
    process = running.start(root, *flags, task__name="tries:Task", training__steps=2 * STEPS, sft__steps=30)
    try:
        running.wait_for_step(root, 3, timeout=240)
        strike(root, "generator 0")
        assert process.wait(300) == 0, running.output(root)[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    steps = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, 2 * STEPS + 1))
    assert all(record["agreement_mean"] == pytest.approx(1, abs=1e-5) for record in steps)
    groups = [group for step in range(1, 2 * STEPS + 1) for group in read_rollouts(RunDir(root).rollouts, step)]
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.status in ("ok", "truncated")]
    assert len(rollouts) > 150
    for rollout in rollouts:
        assert len(rollout.turns) == 3 and len(rollout.spans) == 2
        first, second = rollout.spans
        num_repeated = (rollout.provenance[slice(*second)] == Provenance.REPEATED).sum()
        assert num_repeated == rollout.turns[0].stop - rollout.turns[0].start
        shared = rollout.turns[0].stop
        assert np.array_equal(rollout.tokens[:shared], rollout.tokens[second[0] : second[0] + shared])
    begun = Counter((tmp_path / "tries.py.begun").read_text().split())
    assert {begun[group.prompt_id] for group in groups} == {4}
    assert read(RunDir(root).ledger, lambda ledger: ledger.execute("select sum(retries) from prompts").fetchone()[0])
    assert not flaws(RunDir(root).ledger) and not read(RunDir(root).ledger, read_account)["pending"]
