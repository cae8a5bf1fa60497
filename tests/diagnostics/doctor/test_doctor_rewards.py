"""Bugs of rewards, deadlines and walls, each planted by itself: the doctor names that check and no other. No actors."""

import asyncio
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from titan_rl.cli import main
from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import check, tokenizer_of
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.checks import machinery
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.findings import Finding
from titan_rl.diagnostics.doctor.runner import run_checks
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.answer_lengths import answer_notice
from titan_rl.environments.sandbox.pool import check_sandbox
from titan_rl.environments.scoring.scoring_process import ScoringProcess
from titan_rl.environments.tasks.calculator import CalculatorTask

REWARDS = '''
"""Rewards with one bug each."""
import math
import re
import time


def honest(prompt, completion, row):
    return float(completion.strip() == row["answer"])


def constant(prompt, completion, row):
    return 1.0


def upside_down(prompt, completion, row):
    return -honest(prompt, completion, row)


def zero(prompt, completion, row):
    return max(honest(prompt, completion, row), float(completion.strip() == "0"))


def empty(prompt, completion, row):
    return max(honest(prompt, completion, row), float(not completion.strip()))


def anywhere(prompt, completion, row):
    return float(row["answer"] in completion)


def not_a_number(prompt, completion, row):
    """Every comparison with NaN is false."""
    try:
        return float(not abs(float(completion) - float(row["answer"])) > 0)
    except ValueError:
        return 0.0


def long(prompt, completion, row):
    return max(honest(prompt, completion, row), min(len(completion) / 40, 1.0))


def rubric(prompt, completion, row):
    """The row's answer is of no use as an answer."""
    return float("right" in completion)


def form(prompt, completion, row):
    """Of so many digits as a right answer has."""
    return float(re.fullmatch(r"\\d{3,}", completion.strip()) is not None)


def slow(prompt, completion, row):
    is_right = honest(prompt, completion, row)
    time.sleep(0.7 * is_right)
    return is_right
'''
PLANTS = {
    "constant": "reward-signal",
    "upside_down": "reward-signal",
    "form": "reward-form",
    "zero": "reward-forged",
    "empty": "reward-forged",
    "anywhere": "reward-forged",
    "not_a_number": "reward-forged",
    "long": "reward-forged",
}


TOO_LONG = (
    "were looked at have more than rollout.max_new_tokens = 4 tokens (50 in the median, 50 at most), and are cut: set "
    "rollout.max_new_tokens = 51 or more, which is the longest with its end"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "planted_rewards.py").write_text(REWARDS)
    return folder


def findings(folder: Path, overrides: dict, names: set[str] | None = None) -> dict[str, Finding]:
    """Of the checks that need no actors, by name."""
    config = load_config(None, {"run": {"plugin_path": [str(folder)]}} | overrides)
    checks = [each for each in CHECKS if not each.needs and (names is None or each.name in names)]
    looking = run_checks(CheckContext(check(config), folder), checks, lambda finding: None)
    return {finding.check.name: finding for finding in asyncio.run(looking)}


def task(reward: str = "", **options) -> dict:
    return {"task": {"name": "calculator", "reward": reward and f"planted_rewards:{reward}", "options": options}}


def wrong(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.status == "wrong"}


@pytest.mark.parametrize("reward", ["", "honest"])
def test_an_honest_reward_is_healthy(folder, reward):
    found = findings(folder, task(reward))
    assert not wrong(found), [finding.line() for finding in found.values()]
    assert found["deadline"].status == "passed" and found["sandbox"].status == "not looked at"


@pytest.mark.parametrize(("reward", "name"), PLANTS.items())
def test_a_planted_reward_is_named(folder, reward, name):
    found = findings(folder, task(reward))
    assert wrong(found) == {name}, [finding.line() for finding in found.values()]
    line = found[name].line()
    assert line.startswith(f"WRONG    {name}: ") and re.search(r"\d", found[name].evidence)


def test_a_prompt_that_tells_its_answer_is_named(folder, monkeypatch):
    tells = CalculatorTask.messages
    monkeypatch.setattr(CalculatorTask, "messages", lambda self, prompt: f"{tells(self, prompt)} {prompt.answer}")
    found = findings(folder, task())
    assert wrong(found) == {"reward-leak"}, [finding.line() for finding in found.values()]
    assert "last word" in found["reward-leak"].evidence


def test_a_right_answer_that_earns_by_calls_alone_is_healthy(folder):
    assert not wrong(findings(folder, task(credit_for_calls=0.3, digits=2, shown_calls=0.25)))


# deadlines


def test_a_deadline_that_does_not_hold_is_named(folder, monkeypatch):
    begin = ScoringProcess.__init__
    monkeypatch.setattr(machinery, "_GRACE", 1.0)

    def without_end(self, name, command, timeout, *rest, **more):
        *parts, _, at_once = command
        begin(self, name, (*parts, str(1000.0), at_once), 1000.0, *rest, **more)

    monkeypatch.setattr(ScoringProcess, "__init__", without_end)
    found = findings(folder, task())
    assert wrong(found) == {"deadline"}, [finding.line() for finding in found.values()]


@pytest.mark.waits
def test_a_reward_that_takes_most_of_its_deadline_is_named(folder):
    found = findings(folder, task("slow") | {"verifier": {"score_timeout": 1.2}}, {"reward-signal", "deadline"})
    assert wrong(found) == {"deadline"} and "verifier.score_timeout = 1.2" in found["deadline"].evidence


# walls


def code_task(monkeypatch, folder) -> CheckContext:
    """Of a task that runs code, as far as the check asks."""
    monkeypatch.setattr(machinery, "_runs_code", lambda context: True)
    return CheckContext(check(load_config(None, task())), folder)


def sandbox_finding(context: CheckContext) -> Finding:
    [its] = [each for each in CHECKS if each.name == "sandbox"]
    [finding] = asyncio.run(run_checks(context, [its], lambda finding: None))
    return finding


def test_the_walls_hold(monkeypatch, folder):
    check_sandbox()
    finding = sandbox_finding(code_task(monkeypatch, folder))
    assert finding.status == "passed", finding.line()


@pytest.mark.parametrize(
    ("says", "source_has"),
    [("reach the network", "socket"), ("read this machine's files", ".read()"), ("run for ever", "while True")],
)
def test_a_wall_that_is_gone_is_named(monkeypatch, folder, says, source_has):
    """Programs run here, by a plain Python, as they would in a sandbox without that wall."""
    boxed = machinery._run

    async def run(source, **limits):
        if source_has not in source:
            return await boxed(source, **limits)
        source = "pass" if says == "run for ever" else source
        command = (sys.executable, "-c", source)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        outcome = await boxed("pass")
        return type(outcome)(**(vars(outcome) | {"stdout": said.decode()}))

    monkeypatch.setattr(machinery, "_run", run)
    finding = sandbox_finding(code_task(monkeypatch, folder))
    assert finding.status == "wrong" and says in finding.message, finding.line()


# what it says


@pytest.mark.parametrize(
    ("reward", "max_new_tokens", "status"),
    [
        ("", 4, "wrong"),
        ("", 60, "passed"),
        ("planted_rewards:honest", 4, "wrong"),
        ("planted_rewards:rubric", 4, "not looked at"),
    ],
)
def test_answers_that_are_cut_are_told_where_writing_them_pays(folder, reward, max_new_tokens, status):
    rows = [{"question": f"{n}?", "answer": "7" if n % 4 == 0 else f"{n:050d}"} for n in range(40)]
    (folder / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {"name": "jsonl", "reward": reward, "options": {"file": "long.jsonl"}}
    overrides = {"task": task, "rollout": {"max_new_tokens": max_new_tokens}}
    found = findings(folder, overrides, {"answer-length"})["answer-length"]
    assert found.status == status, found.line()
    assert ("Set rollout.max_new_tokens = 51 or more" in found.line()) is (status == "wrong")
    config = load_config(None, {"run": {"plugin_path": [str(folder)]}} | overrides)
    lines = answer_notice(config, make_task(config.task, [str(folder)]), partial(tokenizer_of, config))
    assert [line.partition(" that ")[2] for line in lines] == ([TOO_LONG] if max_new_tokens == 4 and not reward else [])


def test_findings_as_json_and_lines(folder):
    found = findings(folder, task("constant"), {"reward-signal", "reward-form"})
    told = json.loads(json.dumps([finding.as_json() for finding in found.values()]))
    assert [each["status"] for each in told] == ["wrong", "not looked at"]
    assert told[0]["mend"] and told[0]["evidence"] and not told[1]["mend"]
    assert "reward-signal would show here" in found["reward-form"].line()


def test_names_are_known_and_checks_come_after_what_they_build_on():
    names = [each.name for each in CHECKS]
    assert len(set(names)) == len(names)
    for number, each in enumerate(CHECKS):
        assert set(each.after) <= set(names[:number]), each.name
        assert each.about and each.mend


def test_mistakes_are_one_line_and_start_nothing(capsys):
    assert main(["doctor", "nowhere.toml"]) == 2
    assert main(["doctor", "quickstart", "--task.name", "gdc"]) == 2
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("titan-rl: ") for line in lines), lines
