"""Answers in mathematics: what equals the expected one is right, and nothing else is, however it is put."""

import asyncio
import json
import random
import time
import unicodedata

import math_answers
import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.mathematics import equality
from titan_rl.environments.rewards.mathematics.final_answer import final_answer, is_right
from titan_rl.environments.scoring.scorer import Scorer

HONEST = [
    ("4", "4"),
    ("4", "We add them.\nThe answer is 4."),
    ("4", "Answer: $4$"),
    ("4", r"so \boxed{4} it is"),
    ("4", r"First \boxed{5}. No: \boxed{4}."),
    ("4", "x = 4"),
    ("4", "2^2"),
    (r"\frac{3}{2}", r"\boxed{1\frac{1}{2}}"),
    ("101_2", r"\boxed{101_2}"),
    ("72", "#### 72".replace("#### ", "")),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    (r"\frac{1}{2}", "1/2"),
    ("0.5", r"$\frac{2}{4}$"),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    (r"\frac{\pi}{3}", r"\boxed{ \frac{ \pi }{ 3 } }"),
    ("1,234", "1234"),
    ("12345", r"\boxed{12{,}345}"),
    ("(1, 2)", r"\boxed{(1,2)}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\sin(x)", r"\boxed{\sin x}"),
    ("[0, 1)", r"\boxed{[0,1)}"),
    ("-3", r"\[-3\]"),
    (r"\frac{2\pi}{5}", r"f(x) = \frac{2\pi}{5}"),
    ("y = 2x + 1", r"\boxed{y = 2x+1}"),
    ("x > 3", r"\boxed{x > 3}"),
    (r"\infty", r"\boxed{\infty}"),
]
WRONG = [
    *[("4", each) for each in ("", " ", "\n", "0", "nan", "NaN", "inf", "5", "-4", "4i", "40", "44", "04.1", "?")],
    *[("4", each) for each in (r"4\quad 5", r"4\ 5", r"4 \\ 5", "f(4)", "4!", "|4|5", "4^4", "4:5", "4..5", "four")],
    *[("4", each) for each in ("4.5.6", "4_5", "4'", "4^", "4+", "4/", "4=", r"4\ldots", "4…", "^4", "*4")],
    *[("9", each) for each in ("4 5", r"4\quad 5", r"4\ 5", r"4\;5", "4~5", "1 2 6")],
    ("4", "What is 2+2?"),
    ("4", "1, 2, 3, 4, 5"),
    ("4", "1 2 3 4 5"),
    ("4", r"\boxed{1, 2, 3, 4}"),
    ("4", r"\boxed{\{1, 2, 3, 4\}}"),
    ("4", r"\boxed{4}, or maybe \boxed{5}"),
    ("4", r"\boxed{4 \text{ or } 5}"),
    ("4", "4 or 5"),
    ("4", "5 or 4"),
    ("4", "4 and 5"),
    ("4", r"\boxed{\pm 4}"),
    ("4", r"4 \lor 5"),
    ("4", "4; 5"),
    ("4", "4|5"),
    ("4", "3 = 4"),
    ("4", "x = 3 = 4"),
    ("4", "5 = x = 4"),
    ("4", "4 = 5"),
    ("4", "x > 3"),
    ("4", r"x \geq 4"),
    ("4", r"x \neq 5"),
    ("4", "[0, 10]"),
    ("4", "(4)(5)"),
    ("4", "(4, 4)"),
    ("4", r"\boxed{}"),
    ("4", r"\boxed{4"),
    ("4", r"\boxed{x}"),
    ("4", "$4$ $5$"),
    ("4", "the answer is the expected answer"),
    ("4", r"\text{the expected answer}"),
    ("4", "4 apples and 5 pears"),
    ("4", r"4\%"),
    ("4", "1" * 5000),
    ("4", "4" + " " * 5000 + "5"),
    ("4", "4\u202e5"),
    ("4", "((((" * 200 + "4"),
    ("4", "__import__('os').getpid()"),
    ("4", r"\input{/etc/passwd}"),
    ("4", r"\newcommand{\x}{4}\x\x"),
    (r"\frac{1}{2}", "0.4999"),
    (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\pi", "3.14"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "1"),
    (r"\{1, 2\}", r"\{1\}"),
    (r"\{1, 2\}", r"\{1, 2, 3\}"),
    ("[0, 1)", "[0, 1]"),
    ("x > 3", r"x \geq 3"),
    ("y = 2x + 1", "y = 2x"),
    (r"\infty", r"-\infty"),
    ("x^2", "x^3"),
]
BURNING = [
    "9^{9^{9^{9}}}",
    "7^{10^{9}}",
    "2003^{2002^{2001}}",
    "100000000!",
    r"\int_0^{1} e^{-x^{x^{x}}} dx",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}",
    "(x+y+z+w)^{200}",
    "(((9^9)^9)^9)^9",
    r"\binom{10^{9}}{5 \cdot 10^{8}}",
    r"\sqrt[9]{" * 40 + "2" + "}" * 40,
    r"\prod_{n=1}^{1000000} n",
]


SIGNS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code))[0] in "PSZ"]
"""Every punctuation mark, symbol and separator of Unicode."""
ALLOWED_BEFORE = {"+", "$", "~", "£", "¥", "€"}
ALLOWED_BEHIND = {".", "$", "~", "}", "£", "¥", "€", "°"}
"""Besides spaces: the brace ends the box."""
QUIET = {"quad", "qquad", "text", "mathrm", "mathbf", "operatorname", "pounds", "euro", "fbox"}
"""Commands before an answer that change only how it looks, and currencies."""
LONG = [
    *["\\boxed{" * 20_000, "\\boxed{" * 20_000 + "5" + "}" * 20_000, "\\boxed 5 " * 20_000, "\\boxed" + " " * 200_000],
    *[("\\boxed" + " " * 50) * 4000, "{" * 200_000, " " * 200_000 + "I hope it is correct.", "1 000" * 40_000],
    *[
        box_of[:298] + "}"
        for box_of in (r"\boxed{" + text * 80 for text in (r"{5\over", r"\{x|", "5=", r"x<1\or ", "1 0"))
    ],
]
"""Answers that a careless reader would never be done with."""


def box(answer):
    return rf"so \boxed{{{answer}}}"


@pytest.mark.parametrize(("expected", "answer"), HONEST)
def test_what_is_equal_is_right(expected, answer):
    assert is_right(answer, expected)


@pytest.mark.parametrize(("expected", "answer"), math_answers.HONEST, ids=str)
def test_an_honest_form_is_right(expected, answer):
    assert is_right(box(answer), expected)


@pytest.mark.parametrize(("expected", "answer"), WRONG, ids=range(len(WRONG)))
def test_what_says_something_else_or_several_things_is_wrong(expected, answer):
    assert not is_right(answer, expected)


@pytest.mark.parametrize(("expected", "answer"), math_answers.HOSTILE, ids=str)
def test_two_answers_a_denial_or_another_form_are_wrong(expected, answer):
    assert not is_right(box(answer), expected)


def test_no_sign_of_unicode_makes_two_answers_one():
    forms = [("4", "4{}5"), ("4", "5{}4"), ("4", "4 {} 5"), ("4", "5 {} 4"), ("1/2", "1/2 {} 1/3")]
    tries = [(gold, form.format(sign)) for sign in SIGNS for gold, form in forms if sign != "}"]
    assert len(tries) > 30000 and not [answer for gold, answer in tries if is_right(box(answer), gold)]


def test_no_sign_of_unicode_before_or_behind_an_answer_is_passed_over():
    before = {sign for sign in SIGNS if is_right(box(f"{sign}40"), "40")}
    behind = {sign for sign in SIGNS if is_right(box(f"40{sign}"), "40")}
    spaces = {sign for sign in SIGNS if sign.isspace()}
    assert before == ALLOWED_BEFORE | spaces and behind == ALLOWED_BEHIND | spaces


def test_no_command_makes_two_answers_one_or_denies_one():
    between = [r"4\{} 5", r"5\{} 4", r"4\{}{{5}}", r"4 \{}{{}} 5", r"5\{}{{4}}", r"\{}{{4}}{{5}}", r"4^\{}5"]
    tries = [form.format(name) for name in math_answers.COMMANDS for form in between]
    assert not [answer for answer in tries if is_right(box(answer), "4")]
    before = [form.format(name) for name in math_answers.COMMANDS for form in (r"\{} 40", r"\{}{{40}}")]
    passed = {answer[1:].rstrip("} 40{") for answer in before if is_right(box(answer), "40")}
    assert passed == QUIET


def test_a_number_equals_no_infinite_one_whatever_math_verify_says(monkeypatch):
    parse, _, reading = equality.library()
    monkeypatch.setattr(equality, "library", lambda: (parse, lambda *_, **__: True, reading))
    assert not is_right(box(r"\infty{4}{5}"), "4") and not is_right(box("4"), r"\infty")
    assert is_right(box(r"\infty"), r"\infty + 1"), "both are infinite, and it says that they are equal"


@pytest.mark.parametrize("seed", range(3))
def test_lists_of_answers_never_equal_one(seed):
    """Two to five numbers, in any brackets, with any separator that lists have."""
    draw = random.Random(seed)
    for _ in range(200):
        numbers = [str(draw.randint(0, 20)) for _ in range(draw.randint(2, 5))]
        opening, closing = draw.choice(
            [("", ""), ("(", ")"), (r"\{", r"\}"), ("[", "]"), ("[", ")"), (r"\langle ", r"\rangle")]
        )
        separator = draw.choice([",", ", ", ";", r"\,,", r" \text{ or } ", " and ", r",\ ", r" \text{and} "])
        assert not is_right(box(opening + separator.join(numbers) + closing), draw.choice(numbers))


@pytest.mark.parametrize(
    ("expected", "order", "is_paid"),
    [
        ("(1,2,3)", "(3,2,1)", False),
        ("1,2,3", "3,2,1", True),
        (r"\{1,2,3\}", "3,1,2", True),
        ("1,2,3", "(3,2,1)", False),
    ],
)
def test_order_counts_in_tuples_alone(expected, order, is_paid):
    assert is_right(box(order), expected) == is_paid


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("a\nb", "b"),
        ("The answer is: 4.", "4"),
        ("the result is 3, the answer is 4", "4"),
        (r"\boxed{\frac{1}{2}} and more", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed {\left\{ 1 \right\}}", r"\left\{ 1 \right\}"),
        (r"so $\boxed 5$ then", "5"),
        (r"\(\boxed-12\) it is", "-12"),
        (r"so \boxed 5 or 6", "5 or 6"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"$\boxed{4}$, not $\boxed 5$", "5"),
        (r"\fbox{5}", "5"),
        (r"$\boxed{\boxed{5}}$", "5"),
        (r"\boxed{ \fbox 5 }", "5"),
        (r"\boxed{5 \boxed{4}}", r"5 \boxed{4}"),
        (r"\boxed{\boxed{5} \boxed{4}}", r"\boxed{5} \boxed{4}"),
        (r"\boxed{5}. That is in \boxed as told.", "5"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
        ("**Answer: 4**", "4"),
        ("The answer is **4**.", "4"),
        ("", None),
    ],
)
def test_the_last_word_is_the_answer(answer, found):
    assert final_answer(answer) == found


def test_long_and_deep_answers_are_read_at_once():
    started = time.perf_counter()
    assert not any(is_right(answer, expected) for answer in LONG for expected in ("4", "[1,4)"))
    assert time.perf_counter() - started < 5


def task_of(tmp_path, *rows, **settings):
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": "problems.jsonl", "held_out_share": 0.5}
    return TaskConfig(name="math", options=options, **settings)


def test_rows_are_read_and_a_bad_one_is_named(tmp_path):
    rows = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)]
    task = make_task(task_of(tmp_path, *rows), [str(tmp_path)])
    prompt = next(PromptStream(task, 1))
    assert task.score(prompt, ["thinking", rf"\boxed{{{prompt.answer}}}"]) == {"right": 1.0}
    assert task.score(prompt, [prompt.text]) == {"right": 0.0}
    bad = task_of(tmp_path, *rows, {"prompt": "?", "answer": "\\"})
    with pytest.raises(ConfigError, match="problems.jsonl line 9: the 'answer' .* cannot be read as mathematics"):
        make_task(bad, [str(tmp_path)]).prompt("train", 0, 0)
    with pytest.raises(ConfigError, match="is scored by its answers"):
        make_task(task_of(tmp_path, *rows, reward="a:b"), [str(tmp_path)])


def test_what_burns_its_time_earns_nothing_and_the_rest_is_scored(tmp_path):
    """A power or a sum without end runs into the deadline by itself; the honest answers between are scored."""
    rows = [{"prompt": f"{n}?", "answer": "4"} for n in range(4)]
    config, seconds = task_of(tmp_path, *rows), 3.0

    async def run():
        prompt = next(PromptStream(make_task(config, [str(tmp_path)]), 1))
        scorer = Scorer(config, [str(tmp_path)], seconds, concurrency=16)
        await scorer.start()
        try:
            started = time.perf_counter()
            answers = [[answer] for burning in BURNING for answer in (burning, "4")]
            return (await scorer.score(prompt, answers))[0], time.perf_counter() - started
        finally:
            await scorer.close()

    scores, took = asyncio.run(run())
    assert [(score.status, score.reward) for score in scores[1::2]] == [("ok", 1.0)] * len(BURNING)
    burnt = scores[::2]
    assert not any(score.reward for score in burnt) and "timeout" in {score.status for score in burnt}
    assert took < len(BURNING) * (seconds + 1)
