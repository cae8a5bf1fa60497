"""User code is tried before a run: what can never work is refused, what is slow, asks a server or is right is not."""

import re
from pathlib import Path

import pytest

from titan_rl import train
from titan_rl.config.command_line import EXIT_USER
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import JUDGE
from titan_rl.environments.scoring.reward_trial import RewardTrial, is_tried, reward_trial
from titan_rl.environments.scoring.reward_trial_worker import Tried, report
from titan_rl.mesh.processes.processes import running

CODE = '''
import json, re, subprocess, sys, time
from titan_rl.data.types import Prompt

def missing(prompt, completion, row):
    return float(completion == row["answr"])

def exits(prompt, completion, row):
    sys.exit(3)

def slow(prompt, completion, row):
    time.sleep(60)

async def asks_server(prompt, completion, row):
    raise ConnectionRefusedError("it is not up yet")

def reads_form(prompt, completion, row):
    print("looked at", completion)
    return float(completion.split("####")[1] == row["answer"])

def helps(prompt, completion, row):
    subprocess.Popen(["sleep", "77"], start_new_session=True)
    return 1.0

def wants_json(prompt, completion, row):
    return float(json.loads(completion)["final"] == row["answer"])

def wants_tag(prompt, completion, row):
    return float(re.search(r"<final>(.*)</final>", completion).group(1) == row["answer"])

class Asks:
    """Replies a number, and not text."""

    def __init__(self, task): ...
    def prompt(self, stream, seed, index):
        return Prompt(f"{stream}/{index:07d}", f"{index}=", str(index), {})
    def messages(self, prompt):
        return prompt.text
    def demonstration(self, prompt):
        return prompt.answer
    def reply(self, prompt, answers):
        return 3
    def score(self, prompt, answers):
        return {"right": 1.0}

class Scores(Asks):
    def reply(self, prompt, answers):
        return None
    def score(self, prompt, answers):
        raise ValueError("no score")

while "hang" in __file__:
    time.sleep(1)
'''
COLUMNS = "KeyError: 'answr' (tried_code.py, line 6); the row has the columns 'answer', 'question'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tried")
    (folder / "tried_code.py").write_text(CODE)
    (folder / "tried_hang.py").write_text(CODE)
    (folder / "q.jsonl").write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(9)))
    return folder


def config(folder: Path, **task):
    task = {"name": "jsonl", "options": {"file": "q.jsonl"}} | task if "reward" in task else task
    return load_config(None, {"task": task, "run": {"plugin_path": [str(folder)]}, "verifier": {"score_timeout": 0.5}})


def notices(folder: Path, **task) -> list[str]:
    with reward_trial(config(folder, **task)) as trial:
        return trial.notices(60.0)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"reward": "tried_code:missing"}, COLUMNS),
        ({"reward": "tried_code:exits"}, "tried_code:exits: SystemExit: 3 (tried_code.py, line 9)"),
        ({"name": "tried_code:Asks"}, "task.name = 'tried_code:Asks': reply gave a value of type int: give text"),
        ({"name": "tried_code:Scores"}, "task.name = 'tried_code:Scores': score: ValueError: no score"),
    ],
)
def test_what_can_never_work_is_refused(folder, task, why):
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        notices(folder, **task)
    assert len(refused.value.findings) == 1 and "no answer can be scored" in str(refused.value)


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("slow", "scoring took longer than 0.5 s"),
        ("asks_server", "no answer that was tried could be scored: the answer '"),
        ("wants_json", "TypeError: 'int' object is not subscriptable"),
        ("wants_tag", "no answer that was tried could be scored: the answer '"),
        ("reads_form", None),
    ],
)
def test_what_is_slow_or_waits_for_a_server_or_a_form_is_not(folder, reward, why):
    lines = notices(folder, reward=f"tried_code:{reward}")
    assert [why in line for line in lines] == [True] * (why is not None)


def test_a_run_is_refused_with_nothing_made(folder, tmp_path, monkeypatch, capsys):
    notices = RewardTrial.notices
    monkeypatch.setattr(RewardTrial, "notices", lambda trial: notices(trial, 60.0))
    task = ["--task.name=jsonl", "--task.reward=tried_code:missing", f"--task.options.file={folder}/q.jsonl"]
    model = ["--model.path=tiny", "--training.seq_len=256", "--sft.steps=40"]
    assert train.main([f"--run.dir={tmp_path}/run", f"--run.plugin_path={folder}", *task, *model]) == EXIT_USER
    said = capsys.readouterr().err
    assert COLUMNS in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_what_user_code_has_started_is_ended(folder):
    with reward_trial(config(folder, reward="tried_code:helps")) as trial:
        assert trial.notices(60.0) == [] and not running(trial._mark)
    trial = RewardTrial(config(folder, reward="tried_code:helps"))
    trial._process.wait(60)
    assert running(trial._mark)
    trial.end()
    assert not running(trial._mark)


def test_a_refusal_that_comes_late_is_told(folder):
    with reward_trial(config(folder, reward="tried_code:missing")) as trial:
        trial._process.wait(60)
        [line] = trial.late_notices()
        assert COLUMNS in line and not trial.late_notices()


def test_code_that_hangs_is_ended_with_its_run(folder):
    with reward_trial(config(folder, reward="tried_hang:missing")) as trial:
        assert trial.notices(0.1) == [] and running(trial._mark)
    assert not running(trial._mark)


@pytest.mark.parametrize(
    ("tables", "is_it"),
    [
        ({"task": {"name": "gcd"}}, False),
        ({"task": {"name": "gcd", "reward": "code:reward"}}, True),
        ({"task": {"name": "code:Task"}}, True),
        ({"task": {"name": "gcd", "rewards": {"code:reward": 1.0, JUDGE: 1.0}}}, False),
        ({"task": {"name": "gcd", "reward": "code:reward"}, "reward_model": {"path": "model"}}, False),
        ({"task": {"name": "mixture", "options": {"a": {"name": "gcd"}, "b": {"name": "code:Task"}}}}, True),
        ({"task": {"name": "mixture", "options": {"a": {"name": "code:Task"}}}}, False),
    ],
)
def test_only_user_code_that_asks_nobody_is_tried(tables, is_it):
    config = load_config(None, {})
    for section, settings in tables.items():
        for key, value in settings.items():
            setattr(getattr(config, section), key, value)
    assert is_tried(config) is is_it


def tried(*statuses: str, why: str = "it raised", task: str = "") -> list[Tried]:
    return [Tried(task, f"line {number}", "7", status, why) for number, status in enumerate(statuses)]


def test_a_task_is_refused_by_all_its_rows_alone():
    why = "NameError: name 'x'"
    rows = [*tried("failed", "failed", task="a", why=why), *tried("ok", "failed", task="b"), *tried("ok", task="c")]
    lines = report(rows)
    [refusal], [notice] = lines["refusals"], lines["notices"]
    assert refusal.startswith(f"no answer can be scored: the answer '7' to line 0: {why}: mend that code")
    assert notice == "1 of the 2 rows that were tried cannot be scored: the answer '7' to line 1: it raised"
    assert not report([*tried("failed", why=why), *tried("failed")])["refusals"]
    for said, is_refused in (("ValueError: no score", True), ("OSError: [Errno 113] No route to host", False)):
        own = [Tried("", "line 1", "7", "failed", said, is_own=True)]
        assert bool(report(own)["refusals"]) is is_refused
