"""The real packages' own example environments, unedited, each in a virtual environment of its own, trained on.

The environments are made once, in pytest's cache: OpenEnv's takes half a GB, NeMo Gym's one and a half.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import warm_commands
from fake_servers import play
from server_environments import made, run
from tree import EXAMPLES

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.confirms, pytest.mark.timeout(1800)]
COUNTER = "example_session_state_mgmt.app:StatefulCounterResourcesServer"
TOKENIZER = character_tokenizer()


def python_3_12() -> str:
    """Skips where there is none."""
    candidates = [sys.executable, shutil.which("python3.12")]
    if shutil.which("pyenv"):
        versions = [line for line in run("pyenv", "versions", "--bare").stdout.split() if line.startswith("3.12")]
        candidates += [f"{run('pyenv', 'prefix', version).stdout.strip()}/bin/python" for version in versions]
    for candidate in filter(None, candidates):
        asked = run(candidate, "-c", "import sys, ensurepip; print(sys.version_info[:2] == (3, 12))")
        if asked.stdout.strip() == "True":
            return candidate
    pytest.skip("nemo-gym needs Python 3.12, and none was found")


@contextmanager
def served(log: Path, command: list[str | Path], port: int, **settings):
    """A server that has answered; ended with the block."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment.pop("PYTHONPATH", None)
    with open(log, "w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, **settings)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/openapi.json", trust_env=False)
                break
            except httpx.HTTPError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def openenv(request, tmp_path_factory):
    """The port of the echo environment, as ``openenv init`` makes it."""
    venv, folder, port = made(request.config.cache, "openenv==0.10.0", sys.executable), tmp_path_factory.mktemp("o"), 0
    done = run(venv / "bin/openenv", "init", "echo_env", cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert (folder / "echo_env/server/app.py").is_file(), done.stderr
    port = free_port()
    app = ["-m", "uvicorn", "echo_env.server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    with served(folder / "log", [venv / "bin/python", *app], port, cwd=folder) as port:
        yield port


@pytest.fixture(scope="module")
def counter(request, tmp_path_factory):
    """The port of NeMo Gym's counter, as the package has it."""
    venv, folder = made(request.config.cache, "nemo-gym==0.4.0", python_3_12()), tmp_path_factory.mktemp("n")
    port = free_port()
    command = [venv / "bin/python", EXAMPLES / "servers" / "nemo_gym_server.py", COUNTER, str(port)]
    with served(folder / "log", command, port, cwd=folder) as port:
        yield port


def example(name: str, url: str, **options):
    task = load_config(EXAMPLES / "servers" / f"{name}.toml").task
    settings = task.options | {"url": url} | options
    return make_task(TaskConfig(name=task.name, style=task.style, options=settings), [str(EXAMPLES / "servers")])


def trained(name: str, url: str, root: Path) -> list[dict]:
    """By the committed TOML, but for its server's port: the records of its steps."""
    command = warm_commands.command(
        "-m", "titan_rl.cli", "train", EXAMPLES / "servers" / f"{name}.toml", "--run.dir", root
    )
    done = run(*command, "--task.options.url", url, cwd=root.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [record for record in read_metrics(root) if "reward" in record]


def test_openenvs_echo_is_played_by_one_session_at_a_time(openenv):
    task = example("openenv", f"ws://127.0.0.1:{openenv}/ws")
    task.check_ready()
    group, _ = play(task, next(PromptStream(task, 1)), [["hello", "you"], ["a", "b"], ["x" * 20, "y"]], TOKENIZER)
    texts = [TOKENIZER.decode(rollout.tokens) for rollout in group.rollouts]
    begin = "Say: Echo Env environment ready!\n"
    assert texts[0] == f"{begin}hello<eos>hello\nyou<eos>" and texts[1] == f"{begin}a<eos>a\nb<eos>"
    assert [rollout.status for rollout in group.rollouts] == ["ok"] * 3
    assert [rollout.turn_rewards for rollout in group.rollouts] == [
        pytest.approx([0.5, 0.3]),
        pytest.approx([0.1, 0.1]),
        pytest.approx([1.0, 0.1]),
    ]


def test_more_sessions_than_the_server_has_wait_for_it(openenv):
    """Two where it takes one, as two verifiers have with sessions = 1."""
    task = example("openenv", f"ws://127.0.0.1:{openenv}/ws", sessions=2)
    group, _ = play(task, next(PromptStream(task, 1)), [["a", "b"]] * 4, TOKENIZER)
    assert [rollout.status for rollout in group.rollouts] == ["ok"] * 4


def test_openenv_says_what_of_an_action_does_not_fit(openenv):
    task = example("openenv", f"ws://127.0.0.1:{openenv}/ws", action={"text": "{answer}"})
    [rollout] = play(task, next(PromptStream(task, 1)), [["a", "b"]], TOKENIZER)[0].rollouts
    assert "error: message: Field required; text: Extra inputs" in TOKENIZER.decode(rollout.tokens)
    with pytest.raises(ValueError, match="lacks 'message'"):
        task.check_ready()


def test_openenvs_echo_is_trained_on_by_the_committed_toml(openenv, tmp_path):
    records = trained("openenv", f"ws://127.0.0.1:{openenv}/ws", tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["reward"] > 0 for record in records) and any(record["grad_norm"] > 0 for record in records)
    groups = [group for step in range(1, 6) for group in read_rollouts(RunDir(tmp_path / "run").rollouts, step)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 160 and {rollout.status for rollout in rollouts} <= {"ok", "truncated"}
    assert all("Echo Env environment ready!" in TOKENIZER.decode(rollout.tokens) for rollout in rollouts)


def test_nemo_gyms_counter_is_played_and_pays_for_the_right_count(counter):
    task = example("nemo_gym", f"http://127.0.0.1:{counter}")
    task.check_ready()
    prompt = next(PromptStream(task, 1))
    right = task.demonstration(prompt)
    wrong = ["increment_counter(x)", "no_tool()", "x"]
    group, _ = play(task, prompt, [right, wrong, [right[0], "done"]], TOKENIZER)
    assert [rollout.status for rollout in group.rollouts] == ["ok"] * 3
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0]
    assert '={"success":true}\n' in TOKENIZER.decode(group.rollouts[0].tokens)
    rollout = asyncio.run(demonstrate(prompt, task, TOKENIZER, 20))
    assert f'{{"count":{right[-1]}}}' in TOKENIZER.decode(rollout.tokens)


def test_nemo_gyms_own_rows_are_taken_as_they_are(counter, request, tmp_path):
    venv = made(request.config.cache, "nemo-gym==0.4.0", python_3_12())
    [rows] = venv.glob("lib/*/site-packages/resources_servers/example_session_state_mgmt/data/example.jsonl")
    task = example("nemo_gym", f"http://127.0.0.1:{counter}", file=str(rows))
    assert sum(task.size) == 5
    prompt = next(PromptStream(task, 1))
    assert task.tools_of(prompt)[0]["function"]["name"] == "increment_counter"
    [rollout] = play(task, prompt, [["none"]], TOKENIZER)[0].rollouts
    assert (rollout.status, rollout.reward) == ("ok", 0.0)


def test_nemo_gyms_counter_is_trained_on_by_the_committed_toml(counter, tmp_path):
    records = trained("nemo_gym", f"http://127.0.0.1:{counter}", tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["tool_calls"] > 0 for record in records) and any(record["grad_norm"] > 0 for record in records)
    assert any(record["reward"] > 0 for record in records)
