"""A grader scores beside the reward in a process of its own: what it does, or fails to do, changes no reward."""

import asyncio

import numpy as np
import pyarrow.parquet as pq
import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Group, Rollout
from titan_rl.environments.registry import make_task
from titan_rl.environments.scoring.scorer import GradedScorer, check_grader
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

MODULE = """
import time

def reward(prompt, completion, row):
    return float(row["answer"] in completion)

def grade(prompt, completion, row):
    return 0.5 * (completion == row["answer"])

def fails(prompt, completion, row):
    if completion == "wrong":
        raise ValueError("no idea")
    return 1.0

def hangs(prompt, completion, row):
    time.sleep(60 if completion == "wrong" else 0)
    return 1.0

def odd(prompt):
    return 1.0
"""
TASK = TaskConfig(name="gcd", reward="grading_of_tests:reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders")
    (path / "grading_of_tests.py").write_text(MODULE)
    return str(path)


def scores_of(folder: str, grader: str, *answers: str):
    async def score():
        scorer = GradedScorer(TASK, grader, [folder], 5.0 if "hangs" not in grader else 1.0, concurrency=4)
        await scorer.start()
        try:
            prompt = make_task(TASK, [folder]).prompt("train", 0, 0)
            texts = [answer.format(answer=prompt.answer) for answer in answers]
            return (await scorer.score(prompt, [[text] for text in texts]))[0]
        finally:
            for each in filter(None, (scorer.scorer, scorer.grader)):
                await each.stop()

    return asyncio.run(score())


@pytest.mark.parametrize(("grader", "full"), [("grading_of_tests:grade", 0.5), ("task", 1.0)])
def test_grades_stand_beside_rewards(folder, grader, full):
    scores = scores_of(folder, grader, "{answer}", "0 {answer} 0", "no")
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0]
    assert [score.grade for score in scores] == [full, 0.0, 0.0]
    assert not any(score.message for score in scores)


def test_without_a_grader_there_are_no_grades(folder):
    assert [score.grade for score in scores_of(folder, "", "{answer}")] == [None]


@pytest.mark.parametrize(("name", "why"), [("fails", "no idea"), ("hangs", "longer than 1.0 s")])
def test_a_grade_that_cannot_be_had_is_missing_and_said(folder, name, why):
    scores = scores_of(folder, f"grading_of_tests:{name}", "{answer}", "wrong", "{answer}")
    assert [(score.status, score.reward, score.grade) for score in scores] == [
        ("ok", 1.0, 1.0),
        ("ok", 0.0, None),
        ("ok", 1.0, 1.0),
    ]
    assert "not graded by eval.grader" in scores[1].message and why in scores[1].message


@pytest.mark.parametrize(
    ("grader", "reward", "said"),
    [
        ("task", "", "is the reward itself"),
        (TASK.reward, TASK.reward, "is the reward itself"),
        ("grading_of_tests:nope", "", "there is no 'nope'"),
        ("grading_of_tests:odd", "", "must take (prompt, completion, row)"),
        ("nothing", "", "must look like 'module:name'"),
    ],
)
def test_mistakes_are_told_before_anything_starts(folder, grader, reward, said):
    with pytest.raises(ConfigError) as refused:
        check_grader(TaskConfig(name="gcd", reward=reward), grader, [folder])
    assert said in str(refused.value) and "eval.grader" in str(refused.value) and "\n" not in str(refused.value)


def test_a_grader_that_needs_what_the_rows_do_not_have_is_refused(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    task = TaskConfig(name="jsonl", reward=TASK.reward, options={"file": str(tmp_path / "rows.jsonl")})
    with pytest.raises(ConfigError, match="eval.grader = 'task' cannot grade this task: .* no 'answer'"):
        check_grader(task, "task", [folder])


def rollout(sample: int, grade: float | None) -> Rollout:
    tokens, provenance = np.array([5, 6], np.int32), np.array([0, 1], np.int8)
    columns = (tokens, provenance, np.zeros(2, np.float32), np.zeros(2, np.int32))
    return Rollout("train/0000001", sample, *columns, [], "ok", grade=grade)


def test_grades_are_recorded_and_files_of_earlier_releases_have_none(tmp_path):
    write_rollouts(tmp_path, 1, [Group("train/0000001", [rollout(0, 0.25), rollout(1, None)])])
    [group] = read_rollouts(tmp_path, 1)
    assert [each.grade for each in group.rollouts] == [0.25, None]
    path = tmp_path / "step-000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["grade"]), path)
    [group] = read_rollouts(tmp_path, 1)
    assert [each.grade for each in group.rollouts] == [None, None]
