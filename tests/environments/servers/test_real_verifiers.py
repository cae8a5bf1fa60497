"""The verifiers package's own example environments, unedited, through its own harness, played and trained on."""

import os
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import warm_commands
from chat_templates import QWEN, byte_pair_tokenizer, with_template
from fake_servers import play
from server_environments import made, run
from tree import example

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.confirms, pytest.mark.timeout(1800)]
PACKAGE = "verifiers==0.4.0"
HERE = dict(runtime=dict(type="subprocess"))
TOKENIZER = with_template(QWEN, byte_pair_tokenizer)


@pytest.fixture(scope="module")
def python(request) -> Path:
    """That verifiers is installed for."""
    return made(request.config.cache, PACKAGE, sys.executable, "uv") / "bin/python"


@pytest.fixture(scope="module")
def environments(tmp_path_factory) -> Path:
    """Those among the package's tests."""
    folder = tmp_path_factory.mktemp("verifiers")
    done = run(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "verifiers", PACKAGE, cwd=folder
    )
    if done.returncode:
        pytest.skip(f"the source of {PACKAGE} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    with tarfile.open(folder / "verifiers-0.4.0.tar.gz") as source:
        source.extractall(folder, filter="data")
    return folder / "verifiers-0.4.0/tests/v1/fixtures"


def task_of(python, environments, taskset: str, **agents):
    env = dict(taskset=dict(id=taskset), **agents or dict(agent=dict(harness=dict(id="null")) | HERE))
    options = dict(env=env, python=str(python))
    return make_task(TaskConfig(name="verifiers", style="chat", options=options), [str(environments)])


def test_its_echo_is_played_through_its_own_harness(python, environments):
    task = task_of(python, environments, "echo-v1")
    prompt = next(PromptStream(task, 1))
    phrase = prompt.text.rpartition(": ")[2]
    rollouts = play(task, prompt, [[phrase], ["no idea"]], TOKENIZER, max_tokens=2000)[0].rollouts
    assert [(rollout.status, rollout.reward) for rollout in rollouts] == [("ok", 1.0), ("ok", 0.0)]


def test_its_tools_are_called_by_the_models_own_tokens(python, environments):
    task = task_of(python, environments, "echo-tool-v1")
    [prompt] = task.every_prompt()
    call = '<tool_call>{"name": "echo_back", "arguments": {"message": "hello world"}}</tool_call>'
    [called, not_called] = play(task, prompt, [[call, "done"], ["no"]], TOKENIZER, max_tokens=2000)[0].rollouts
    assert (called.status, called.reward, len(called.turns), called.branches) == ("ok", 1.0, 2, [])
    assert "hello world [ok-7f3]" in TOKENIZER.decode(called.tokens)
    assert (not_called.status, not_called.reward) == ("ok", 0.0)


def test_of_two_that_play_only_the_trainable_one_is_trained(python, environments):
    task = task_of(python, environments, "duet-v1", a=HERE, b=HERE)
    rollouts = play(task, next(PromptStream(task, 1)), [["a", "b"]], TOKENIZER, max_tokens=2000)[0].rollouts
    assert [(rollout.status, len(rollout.turns), rollout.branches) for rollout in rollouts] == [("ok", 1, [])]


def test_its_echo_is_trained_on_by_the_committed_toml(python, environments, smollm2, tmp_path):
    file, root = example("verifiers"), tmp_path / "run"
    flags = dict(model__path=smollm2, task__options__python=python, run__plugin_path=f"['{environments}']")
    settings = [part for name, value in flags.items() for part in (f"--{name.replace('__', '.')}", str(value))]
    command = warm_commands.command("-m", "titan_rl.cli", "train", file, "--run.dir", root, *settings)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert any(record["reward"] > 0 for record in records) and any(record["grad_norm"] > 0 for record in records)
    groups = [group for step in range(1, 6) for group in read_rollouts(RunDir(root).rollouts, step)]
    size = load_config(file, {"model": {"path": str(smollm2)}}).rollout
    assert sum(len(group.rollouts) for group in groups) == 5 * size.prompts_per_step * size.group_size
    assert {rollout.status for group in groups for rollout in group.rollouts} <= {"ok", "truncated"}
    assert os.path.isdir(root / "model")
    evaluated(root / "model", python, environments, tmp_path)


def evaluated(model: Path, python: Path, environments: Path, folder: Path) -> None:
    """Its environment as a suite: each task is asked, and rewarded by its own harness."""
    env = 'taskset.id = "echo-v1", agent.harness.id = "null", agent.runtime.type = "subprocess"'
    task = f'task = {{ name = "verifiers", style = "chat", options.python = "{python}", options.env = {{ {env} }} }}'
    suite = f'name = "echo", k = 2, temperature = 0.7, max_new_tokens = 16, {task}'
    file = folder / "suite.toml"
    file.write_text(f'run.plugin_path = ["{environments}"]\neval.suites = [{{ {suite} }}]\n')
    command = warm_commands.command("-m", "titan_rl.cli", "eval", model, "--config", file)
    done = run(*command, "--out", folder / "evaluation", cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = pq.read_table(folder / "evaluation" / "echo.parquet").to_pylist()
    size = task_of(python, environments, "echo-v1").size
    assert size is not None and len(answers) == 2 * (size.train + size.held_out)
    assert {answer["status"] for answer in answers} <= {"ok", "truncated"}
