"""Environments of the verifiers library, in a worker of their own; the real package is in test_real_servers.py."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import time

import pytest
from chat_templates import CHATML, with_template
from fake_servers import play
from tree import SUPPORT

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config, TaskConfig
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.suites import make_suites
from titan_rl.records.run_directory.rundir import RunDir

FAKE = '''
    """As much of verifiers as the worker asks for; its harness speaks plain HTTP."""
    import hashlib, json, os, sys, time, types, urllib.request
    import asyncio
    from contextlib import asynccontextmanager

    class Task:
        def __init__(self, word):
            self.data = types.SimpleNamespace(prompt=f"say {word}", system_prompt=None, answer=word)
            self.hash = hashlib.sha256(word.encode()).hexdigest()

    class Env:
        def __init__(self, config):
            self.taskset = map(Task, config["taskset"]["words"])

        @asynccontextmanager
        async def serving(self):
            yield

        def slots(self, task):
            return [task]

        async def run_slot(self, task, context):
            print("what an environment prints is no answer")
            return await asyncio.to_thread(self.ask, task, context)

        def ask(self, task, context):
            body = {"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]}
            key = os.environ[context.client.api_key_var]
            headers = {"Authorization": f"Bearer {key}", "X-Session-ID": "one"}
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            url = f"{context.client.base_url}/chat/completions"
            asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
            said = json.load(opener.open(asked))["choices"][0]["message"]["content"]
            error = []
            if said == "die":
                os._exit(3)
            if said == "hang":
                time.sleep(60)
            if said == "fail":
                error = [types.SimpleNamespace(type="TaskError", message="no bread")]
            agent = types.SimpleNamespace(trainable=said != "alone")
            trace = types.SimpleNamespace(id="one", agent=agent, reward=float(said == task.data.answer), errors=error)
            return types.SimpleNamespace(errors=[], traces=[trace], ok=not error)

    def resolve_env_config(table):
        if table["taskset"]["id"] != "words":
            raise ModuleNotFoundError(f"taskset {table['taskset']['id']!r} not found")
        return table

    load_environment = Env
    EvalClientConfig = ModelContext = types.SimpleNamespace
'''
WORDS = ["red", "blue", "green", "black", "white", "brown"]


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "code" / "verifiers"
    (package / "v1").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "v1" / "__init__.py").write_text(textwrap.dedent(FAKE))
    return tmp_path / "code"


def task_of(folder, words=WORDS, style="chat", **options):
    env = dict(taskset=dict(id="words", words=words))
    return make_task(TaskConfig(name="verifiers", style=style, options=dict(env=env) | options), [str(folder)])


def played(folder, *answers, **options):
    task = task_of(folder, **options)
    prompt = next(PromptStream(task, 1))
    word = prompt.text.removeprefix("say ")
    group, _ = play(task, prompt, [[answer.replace("WORD", word)] for answer in answers], with_template(CHATML))
    return group.rollouts


def test_tasks_are_listed_once_and_told_apart(folder):
    task = task_of(folder)
    assert sum(task.size) == 6 and task.size.held_out >= 1
    assert {p.text for p in held_out_prompts(task, 1)}.isdisjoint(task.prompt("train", 1, i).text for i in range(20))
    assert task.messages(next(PromptStream(task, 1)))[0]["role"] == "user"


def test_a_suite_asks_all_of_its_tasks(folder):
    env = {"taskset": {"id": "words", "words": WORDS}}
    task = {"name": "verifiers", "style": "chat", "options": {"env": env}}
    tables = {"run": {"plugin_path": [str(folder)]}, "eval": {"suites": [{"name": "words", "task": task}]}}
    [suite] = make_suites(load_config(None, tables))
    assert [prompt.text for prompt in suite.with_prompts(2).prompts] == [f"say {word}" for word in WORDS]


def test_its_environment_asks_and_rewards(folder):
    rollouts = played(folder, "WORD", "no")
    assert [(rollout.status, rollout.reward) for rollout in rollouts] == [("ok", 1.0), ("ok", 0.0)]


def test_what_fails_there_is_no_wrong_answer(folder):
    right, failed, alone = played(folder, "WORD", "fail", "alone")
    assert (right.status, right.reward) == ("ok", 1.0)
    assert failed.status == "infra_error" and "TaskError: no bread" in failed.failure
    assert alone.status == "infra_error" and "no agent of the episode is trainable" in alone.failure


def test_a_worker_that_dies_takes_no_run_with_it(folder, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    rollouts = played(folder, "die", "die")
    assert "what an environment prints is no answer\n" in capfd.readouterr().err
    assert {rollout.status for rollout in rollouts} == {"infra_error"}
    assert all("died" in rollout.failure for rollout in rollouts)


@pytest.mark.waits
def test_an_episode_has_a_deadline_and_its_session_is_free_again(folder):
    start = time.monotonic()
    hung, right = played(folder, "hang", "WORD", timeout=3.0, sessions=1)
    assert hung.status == "timeout" and (right.status, right.reward) == ("ok", 1.0)
    assert time.monotonic() - start < 20


def test_nothing_is_left_when_its_parent_is_killed(folder, tmp_path):
    program = f"""
import asyncio, sys
sys.path[:0] = {[os.path.dirname(__file__), *map(str, [SUPPORT, *SUPPORT.iterdir()])]!r}
from test_verifiers import task_of
from titan_rl.environments.prompts.stream import PromptStream
async def main():
    task = task_of({str(folder)!r})
    agent = task.agent(next(PromptStream(task, 1)))
    await agent.process.start()
    print(agent.process.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def killed() -> int:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        worker = int(await asyncio.wait_for(parent.stdout.readline(), 60))
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        return worker

    worker, deadline = asyncio.run(killed()), time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(style="compact"), "task.style = 'chat'"),
        (dict(python="/bin/sh"), "is no Python"),
        (dict(sesions=3), "sessions"),
    ],
)
def test_mistakes_are_told_before_anything_starts(folder, settings, told):
    with pytest.raises(ConfigError, match=told):
        task_of(folder, **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(words=["red"]), "it takes two"),
        (dict(python="/nowhere/python3"), "No such file"),
        (dict(env=dict(taskset=dict(id="swords"))), "taskset 'swords' not found"),
    ],
)
def test_an_environment_that_cannot_be_had_is_told_in_one_line(folder, settings, told):
    with pytest.raises(ConfigError, match=told) as caught:
        _ = task_of(folder, **settings).size
    assert len(str(caught.value).splitlines()) == 1


def test_without_the_package_the_mend_is_told(tmp_path):
    with pytest.raises(ConfigError, match="install verifiers in an environment of its own"):
        _ = task_of(tmp_path).size


def test_what_a_record_names_is_imported_and_run_only_from_elsewhere(folder, tmp_path):
    def recorded(**options) -> Config:
        env = dict(taskset=dict(id="words"), agent=dict(harness=dict(id="owner/my-loop@1.2")))
        path.write_text(json.dumps({"task": {"name": "verifiers", "options": dict(env=env) | options}}))
        return load_recorded(RunDir(run), path, folders)

    run, path, folders = tmp_path / "run", tmp_path / "config.json", []
    with pytest.raises(ConfigError, match=r"task.options.env.taskset.id = 'words:words'"):
        recorded()
    folders = [str(folder)]
    assert recorded().task.options["env"]["taskset"]["id"] == "words"
    (run / "bin").mkdir(parents=True)
    (run / "bin" / "python3").touch()
    with pytest.raises(ConfigError, match="whose programs are not run"):
        recorded(python=str(run / "bin" / "python3"))
    (run / "my_loop.py").touch()
    folders = [str(folder), str(run)]
    with pytest.raises(ConfigError, match="leads into"):
        recorded()
