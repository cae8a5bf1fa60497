"""Families whose own scorers run the answer as Python: right answers pass, and nothing that is said is run."""

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.reasoning_gym.checked_families import RUNS_THE_ANSWER, checked_score
from titan_rl.environments.reasoning_gym.expressions import Unreadable, read, symbolic, value
from titan_rl.environments.reasoning_gym.families import make_dataset, worked_answer
from titan_rl.environments.registry import make_task

SUMS = ("countdown", "puzzle24")
SYMBOLS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
TEXTS = sorted(RUNS_THE_ANSWER - {*SUMS, *SYMBOLS})
RUN = [  # what Python would run
    "__import__('os').system('touch {marker}')",
    "open('{marker}', 'w').write('1')",
    'exec(\'open("{marker}", "w")\')',
    'eval(\'open("{marker}", "w")\')',
    "(lambda: open('{marker}', 'w'))()",
    "[open('{marker}', 'w') for _ in [0]]",
    "().__class__.__base__.__subclasses__()",
    "sin.__globals__",
    "getattr(x, 'x')",
    "print(1)",
    "globals()",
    "breakpoint()",
    "exit()",
    "x if x else x",
    "x := 1",
    "f'{{x}}'",
    "*[1]",
    "lambda x: x",
    "Integer(24)",
    "sympify('24')",
    "Symbol('x')",
    "Integral(x, x)",
    "S(24)",
    "N(24)",
    "nsimplify(24)",
]
NO_NUMBERS = [
    "",
    " ",
    "nan",
    "inf",
    "oo",
    "zoo",
    "-",
    "()",
    "None",
    "True",
    "I",
    "1e3",
    "0x18",
    "1_0",
    "2.0",
    "２４",
    "24j",
    "½",
]
HEAVY = [
    "9**9**9**9",
    "(9**64)**64",
    "((9**60)**60)**60",
    "9**(9**9)",
    "x**(10**9)",
    "(x+1)**(1/999)",
    "factorial(10000)",
    "(" * 190 + "1" + ")" * 190,
    "-" * 300 + "1",
    "1" * 399,
    "1/0",
    "0**-1",
    "x" * 399,
    "+".join(["1"] * 190),
]
HOSTILE = [*RUN, *NO_NUMBERS, *HEAVY]


@pytest.mark.parametrize("name", sorted(RUNS_THE_ANSWER))
def test_the_familys_own_answers_are_right(name):
    dataset = make_dataset(name, 11)
    entries = [dataset[index] for index in range(40)]
    assert all(checked_score(name, entry, worked_answer(name, entry)) == 1.0 for entry in entries)
    others = [worked_answer(name, entry) for entry in entries[1:]] + [worked_answer(name, entries[0])]
    wrong = [
        checked_score(name, entry, other)
        for entry, other in zip(entries, others, strict=True)
        if other != worked_answer(name, entry)
    ]
    assert not any(wrong)


@pytest.mark.parametrize("name", sorted(RUNS_THE_ANSWER))
def test_what_is_hostile_is_neither_run_nor_paid(name, tmp_path):
    dataset, marker = make_dataset(name, 11), tmp_path / "marker"
    for index in range(3):
        entry = dataset[index]
        right = worked_answer(name, entry)
        for text in HOSTILE:
            text = text.format(marker=marker)
            for answer in (text, f"{right}, {text}", f"{text}\n{right}"):
                assert answer.strip() == right or checked_score(name, entry, answer) == 0.0, answer
        for answer in (f"[{right}]", f"{right} {right}", f"{right};", entry["question"], f"'{right}'", f"{right}\0"):
            assert checked_score(name, entry, answer) == 0.0, answer
    assert not marker.exists()


@pytest.mark.parametrize("name", SUMS)
def test_a_target_is_made_of_all_its_numbers_each_once(name):
    entry = make_dataset(name, 11)[0]
    entry["metadata"] |= {"numbers": [4, 8, 6, 2], "target": 24}
    for right in ("4*8 - 6 - 2", "(4*8-6)-2", "-(6+2) + 8*4", "8/(4-2)*6", "4*(8-2)*6/6"):
        used = sorted(int(n) for n in "".join(c if c.isdigit() else " " for c in right).split())
        assert checked_score(name, entry, right) == float(used == [2, 4, 6, 8]), right
    for wrong in (
        "24",
        "4*6",
        "4*8-6-2+0",
        "4*8 - 6 - 2 = 24",
        "48/2",
        "4*8-(6+2)*1",
        "4*8-6-2-24+24",
        "2*4*6/8*4",
        "86-4*2",
    ):
        assert checked_score(name, entry, wrong) == 0.0, wrong


def test_thirds_are_exact():
    assert value(read("8/(3-8/3)")) == 24
    with pytest.raises(Unreadable):
        value(read("2**3"))


@pytest.mark.parametrize("name", ["intermediate_integration", "simple_integration"])
def test_an_antiderivative_is_one_in_any_form_and_nothing_near_it_is(name):
    entry = make_dataset(name, 11)[0]
    entry["metadata"] |= {"variable": "x", "integrand": "6*x*cos(x**2) + 4*x**3"}
    for right in (
        "3*sin(x**2) + x**4 + C",
        "3*sin(x**2)+x**4",
        "C + x**4 - 3*sin(-x**2) + 7",
        "x**4 + 6*sin(x**2)/2 + pi",
    ):
        assert checked_score(name, entry, right) == 1.0, right
    tiny = "*".join(["(1/1000000000000)"] * 6)
    for wrong in (
        *(
            "3*sin(x**2)",
            "x**4 + C",
            "3*cos(x**2) + x**4 + C",
            "6*x*cos(x**2) + 4*x**3",
            "C",
            "0",
            "C*x + 3*sin(x**2) + x**4",
        ),
        *("Integral(6*x*cos(x**2) + 4*x**3, x)", "3*sin(x**2) + x**4 + y", f"3*sin(x**2) + x**4 + {tiny}*x"),
        *("3*sin(x**2) + x**4 + exp(-1000)*x", "3*sin(x**2) + x**4 + C, C", "3*SIN(x**2) + x**4", "integrate(x)"),
    ):
        assert checked_score(name, entry, wrong) == 0.0, wrong


def test_a_product_is_multiplied_out():
    entry = dict(answer="2*x**2 + 5*x - 3", metadata={"variables": ["x"]})
    for right in ("2*x**2 + 5*x - 3", "5*x - 3 + 2*x**2", "x**2*2+x*5-3", "2*x**2 + 6*x - x - 3"):
        assert checked_score("polynomial_multiplication", entry, right) == 1.0, right
    for wrong in ("(x + 3)*(2*x - 1)", "2*x**2 + 5*x", "2*y**2 + 5*y - 3", "2*x**2 + 5*x - 3 + C"):
        assert checked_score("polynomial_multiplication", entry, wrong) == 0.0, wrong


def test_only_what_is_named_has_a_meaning():
    assert str(symbolic(read("exp(x) + E**(x)"), ["x"])) == "2*exp(x)"
    for text in (
        "y",
        "sin(x, x)",
        "sin(x=1)",
        "x(1)",
        "f(x)",
        "gamma(x)",
        "x % 2",
        "x // 2",
        "x @ x",
        "~x",
        "x < 1",
        "1 2",
    ):
        with pytest.raises(Unreadable):
            symbolic(read(text), ["x"])


def test_the_familys_own_scorer_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="would run the answer"):
        make_task(TaskConfig(name="countdown", style="chat", scoring="family"))
    task = make_task(TaskConfig(name="countdown", style="chat"))
    prompt: Prompt = task.prompt("train", 1, 0)
    assert task.score(prompt, [task.demonstration(prompt)]) == {"exact": 1.0} and task.score(prompt, [""]) == {
        "exact": 0.0
    }
