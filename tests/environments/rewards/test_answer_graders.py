"""Rewards by the expected answer, by name."""

import re

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.answer_graders import gsm8k, gsm8k_flexible, is_number


@pytest.mark.parametrize(
    ("answer", "expected", "strict", "flexible"),
    [
        ("48/2 = 24, so 72.\n#### 72", "72", True, True),
        ("#### 1,072", "1072", True, True),
        ("#### $72", "72", False, True),
        ("#### -3.", "-3", True, True),
        ("The answer is 72.", "72", False, True),
        ("####72", "72", False, True),
        ("#### 72 and then 5", "72", True, False),
        ("#### 71 or #### 72", "72", False, True),
        ("#### 72 or #### 71", "72", True, False),
        ("#### 720", "72", False, False),
        ("#### ", "72", False, False),
        ("", "", False, False),
        ("", "72", False, False),
        ("x" * 100_000, "72", False, False),
        ("#### " * 50_000, "72", False, False),
        ("1," * 50_000, "72", False, False),
    ],
)
def test_gsm8k_reads_the_first_number_behind_hashes_and_flexibly_the_last_number(answer, expected, strict, flexible):
    assert (gsm8k(answer, expected), gsm8k_flexible(answer, expected)) == (strict, flexible)


@pytest.mark.parametrize(
    ("answer", "number"), [("a 5 #### 1,234 b", "1234"), ("#### 9.", "9"), ("#### -12", "-12"), ("none", "")]
)
def test_strict_agrees_with_the_regular_expression_of_the_field(answer, number):
    """verl's and lm-eval's, where an answer has one."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", answer)
    assert (found[-1].replace(",", "").rstrip(".") if found else "") == number
    assert not number or gsm8k(answer, number)


@pytest.mark.parametrize("number", ["72", "-3", "1,072", "$72", " 72. ", "0.5", "72.0", "-.5"])
def test_what_is_a_number_is_found_by_both_rules_where_it_is_the_answer(number):
    plain = number.strip(" $")
    assert is_number(number) and gsm8k(f"#### {plain}", number) and gsm8k_flexible(f"It is {plain}", number)


@pytest.mark.parametrize("text", ["", " ", "1/2", "50%", "72 apples", "x", "72..", "1.2.3", "--1", "٧٢", "."])
def test_what_is_no_number_is_not_expected(text):
    assert not is_number(text)


@pytest.mark.parametrize(
    ("reward", "answer", "paid"),
    [
        ("gsm8k", "#### 4", 1.0),
        ("gsm8k", "4", 0.0),
        ("gsm8k_flexible", "it is 4", 1.0),
        ("math", "\\boxed{2 + 2}", 1.0),
    ],
)
def test_a_task_is_rewarded_by_a_name(reward, answer, paid):
    task = make_task(TaskConfig(name="gcd", reward=reward))
    assert task.score(Prompt("train/0", "8 and 4", "4", {}), [answer]) == {"right": paid}


def test_a_name_is_one_of_several_rewards_by_their_weights():
    task = make_task(TaskConfig(name="gcd", rewards={"gsm8k": 0.75, "gsm8k_flexible": 0.25}))
    parts = task.score(Prompt("train/0", "8 and 4", "4", {}), ["4"])
    assert parts == {"gsm8k.right": 0.0, "gsm8k_flexible.right": 0.25}


def test_an_unknown_name_is_one_line():
    with pytest.raises(ConfigError, match="gsm9k"):
        make_task(TaskConfig(name="gcd", reward="gsm9k"))
