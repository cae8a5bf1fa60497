"""Several tasks in one run: each prompt is of one of them, in the shares that were asked for, and is told apart."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.controller.preflight.checks import check
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.data.types import Group, Provenance, Rollout
from titan_rl.environments.prompts.curriculum import class_of
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import sampling_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.sources import find_sources
from titan_rl.records.statistics import Proportion
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

OPTIONS = {
    "divisors": {"name": "gcd", "weight": 2},
    "calculator": {"options": {"digits": 2}},
    "rows": {"name": "jsonl", "options": {"file": "rows.jsonl"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def mixture(folder, **options):
    return make_task(TaskConfig(name="mixture", options=OPTIONS | options), [str(folder)])


def test_each_has_its_share_of_every_round(folder):
    task = mixture(folder)
    prompts = [task.prompt("train", 3, index) for index in range(400)]
    rounds = [prompts[start : start + 4] for start in range(0, 400, 4)]
    assert all(Counter(p.task for p in each) == {"divisors": 2, "calculator": 1, "rows": 1} for each in rounds)
    assert len({tuple(p.task for p in each) for each in rounds}) > 6, "their order is drawn"
    assert [p.id for p in prompts[:2]] == ["train/0000000", "train/0000001"]
    again = [mixture(folder).prompt("train", 3, index) for index in range(400)]
    assert again == prompts


def test_a_tasks_prompts_are_what_it_gives_alone(folder):
    task = mixture(folder)
    prompts = [task.prompt("train", 3, index) for index in range(80)]
    alone = make_task(TaskConfig(name="gcd"))
    texts = [prompt.text for prompt in prompts if prompt.task == "divisors"]
    assert texts == [alone.prompt("train", 3, index).text for index in range(40)]
    rows = [prompt.text for prompt in prompts if prompt.task == "rows"]
    count = make_task(TaskConfig(name="jsonl", options={"file": "rows.jsonl"}), [str(folder)]).size.train
    assert len(set(rows[:count])) == count and set(rows[count : 2 * count]) == set(rows[:count]), "epoch by epoch"


def test_no_training_prompt_is_held_out(folder):
    task = mixture(folder)
    held_out = held_out_prompts(task, 40)
    assert {prompt.task for prompt in held_out} == set(OPTIONS) and all(map(task.is_held_out, held_out))
    trained = {(prompt.task, prompt.text) for prompt in islice(PromptStream(task, 1), 200)}
    assert not trained & {(prompt.task, prompt.text) for prompt in held_out}


def test_each_is_asked_and_scored_as_it_would_be_alone(folder):
    task = mixture(folder)
    by_task = {prompt.task: prompt for prompt in (task.prompt("train", 3, index) for index in range(4))}
    for label, prompt in by_task.items():
        demonstration = task.demonstration(prompt)
        answers = [demonstration] if isinstance(demonstration, str) else demonstration
        assert sum(task.score(prompt, answers).values()) == 1 and sum(task.score(prompt, ["no"]).values()) == 0
        assert class_of(task, prompt).startswith(f"difficulty {label}, ")
    names = {label: [tool["function"]["name"] for tool in task.tools_of(p)] for label, p in by_task.items()}
    assert names == {"divisors": [], "calculator": ["calc"], "rows": []}
    assert len(encode_prompt(task, character_tokenizer(), by_task["calculator"])) > 0


def group(index: int, task: str, *rewards: float) -> Group:
    provenance = np.array([Provenance.TEMPLATE, Provenance.MODEL], np.int8)
    columns = (np.array([5, 6], np.int32), provenance, np.zeros(2, np.float32), np.zeros(2, np.int32))
    rollouts = [Rollout(f"train/{index:07d}", n, *columns, [], "ok", reward=r) for n, r in enumerate(rewards)]
    return Group(f"train/{index:07d}", rollouts, task=task)


def test_metrics_and_records_tell_them_apart(tmp_path):
    groups = [group(0, "sums", 1, 0), group(1, "sums", 1, 1), group(2, "words", 0, 0.5)]
    metrics = sampling_metrics(groups, 0)
    assert (metrics["reward/sums"], metrics["accuracy/sums"], metrics["prompts/sums"]) == (0.75, 0.75, 2 / 3)
    assert (metrics["reward/words"], metrics["accuracy/words"]) == (0.25, 0)
    assert not any("/" in name for name in sampling_metrics([group(0, "", 1, 0)], 0))
    write_rollouts(tmp_path, 1, groups)
    assert [each.task for each in read_rollouts(tmp_path, 1)] == ["sums", "sums", "words"]


def test_held_out_accuracy_is_told_of_each():
    whole = Proportion(3, 4, {"sums": Proportion(2, 2), "words": Proportion(1, 2)})
    assert str(whole).endswith("; sums 100.0% of 2; words 50.0% of 2)")
    assert Proportion.from_dict(json.loads(json.dumps(whole.as_dict()))) == whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a table [task.options.NAME] for each of two tasks"),
        ({"gcd": {}}, "for each of two tasks"),
        ({"gcd": {}, "lcm": 3}, "task.options.lcm = 3: a mixture's options are tables"),
        ({"gcd": {}, "l c m": {}}, "task.options.l c m: name it with letters"),
        ({"gcd": {}, "lcm": {"wait": 2}}, "unknown key task.options.lcm.wait: did you mean 'weight'?"),
        ({"gcd": {}, "lcm": {"weight": 0}}, "task.options.lcm.weight = 0"),
        ({"gcd": {}, "other": {}}, "task.options.other: "),
        ({"gcd": {}, "lcm": {"options": {"odd": 1}}}, "task.options.lcm: unknown key task.options.odd"),
        ({"gcd": {}, "both": {"name": "mixture"}}, "no further mixtures"),
        ({"gcd": {}, "lcm": {"system_prompt": "Be brief."}}, "task.options.lcm.system_prompt needs"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_table(options, said):
    with pytest.raises(ConfigError) as refused:
        make_task(TaskConfig(name="mixture", options=options))
    [line] = str(refused.value).splitlines()
    assert said in line


def test_what_is_checked_and_recorded_of_a_task_is_of_each(folder, tmp_path):
    tables = {"task": {"name": "mixture", "options": OPTIONS}, "run": {"plugin_path": [str(folder)]}}
    config = load_config(None, tables | {"eval": {"prompts": 20}})
    assert list(all_tasks(config.task)) == ["task", *(f"task.options.{label}" for label in OPTIONS)]
    check(config)
    assert list(find_sources(config)) == ["task.options.rows.options.file"]
    (tmp_path / "own.py").write_text("def reward(prompt, completion, row): return 1.0")
    named = {"gcd": {}, "lcm": {"reward": "own:reward"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": {"name": "mixture", "options": named}}))
    with pytest.raises(ConfigError, match="task.options.lcm.reward = 'own:reward'"):
        load_recorded(RunDir(tmp_path / "run"), path, [])
    served = {"name": "openenv", "options": {"action": "own:act", "observation": "text"}}
    path.write_text(json.dumps({"task": {"name": "mixture", "options": {"gcd": {}, "served": served}}}))
    with pytest.raises(ConfigError, match="task.options.served.options.action = 'own:act'"):
        load_recorded(RunDir(tmp_path / "run"), path, [])
    bad = OPTIONS | {"rows": {"name": "jsonl", "options": {"file": "absent.jsonl"}}}
    with pytest.raises(ConfigError, match=r"task.options.rows: task.options.file = 'absent.jsonl'"):
        check(load_config(None, tables | {"task": {"name": "mixture", "options": bad}}))
