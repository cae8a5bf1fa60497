"""How reasoning-gym answers are scored: no pay for an answer that never changes, and the full score for a right one."""

import json
from functools import partial
from importlib.metadata import version

import pytest

from titan_rl.cli import main
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.diagnostics.bench.models.constant_answers import constant_pay, garbage_pay
from titan_rl.environments.reasoning_gym import constant_answers
from titan_rl.environments.reasoning_gym.checked_families import RUNS_THE_ANSWER
from titan_rl.environments.reasoning_gym.constant_answers import LARGEST_PAY, TABLE, measured
from titan_rl.environments.reasoning_gym.families import (
    PAYS_FOR_NOTHING,
    default_scoring,
    exact_score,
    family_score,
    has_own_scorer,
    make_dataset,
    usable_families,
)
from titan_rl.environments.registry import Task, correct, make_task
from titan_rl.environments.scoring.scoring_process import read_score

WITHOUT_ANSWERS = {"boxnet", "rush_hour"}
SEVERAL_ANSWERS = {"graph_color", "propositional_logic", "rubiks_cube", *WITHOUT_ANSWERS}
"""Families that give no single right answer."""
FOR_PART = {
    "game_of_life": json.dumps([[0] * 10] * 10),
    "polynomial_equations": "0.0",
    "rectangle_count": "7",
    "time_intervals": "00:00",
}
"""An answer that never changes, and is paid in part."""


def make_gym(name: str, scoring: str = "auto", style: str = "chat", **options) -> Task:
    return make_task(TaskConfig(name=name, style=style, scoring=scoring, options=options))


def reward(task: Task, index: int, answer: str) -> float:
    return sum(task.score(task.prompt("train", 3, index), [answer]).values())


def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        make_task(TaskConfig(**settings))
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    "said",
    [
        "",
        "{",
        "[]",
        "1.0",
        '{"status": "ok", "message": ""}',
        '{"status": "ok", "parts": {"exact": "much"}, "message": ""}',
        '{"status": "ok", "parts": {"exact": NaN}, "message": ""}',
        '{"status": "ok", "parts": {"exact": "1.0"}, "message": ""}',
        '{"status": "ok", "parts": {"exact": true}, "message": ""}',
        '{"status": "ok", "parts": {"exact": 1e400}, "message": ""}',
        f'{{"status": "ok", "parts": {{"exact": {10**4200}}}, "message": ""}}',
        f'{{"status": "ok", "parts": {{}}, "turn_rewards": [{10**400}], "message": ""}}',
        '{"status": "fine", "parts": {"exact": 1.0}, "message": ""}',
        '{"status": "ok", "parts": {"exact": 1.0}, "message": 7}',
    ],
)
def test_what_is_no_score_is_no_reward_of_zero(said):
    score = read_score(said)
    assert (score.status, score.parts) == ("infra_error", {}) and score.message


# right answers


@pytest.mark.parametrize("name", sorted(set(usable_families()) - WITHOUT_ANSWERS))
def test_a_worked_answer_earns_the_full_score_and_its_lack_none(name):
    task = make_gym(name, "exact")
    prompt = task.prompt("train", 3, 0)
    assert task.score(prompt, [task.demonstration(prompt)]) == {"exact": 1.0}
    assert reward(task, 0, "I am not sure") == 0


@pytest.mark.parametrize("name", sorted(SEVERAL_ANSWERS))
def test_saying_none_is_not_right_where_there_is_no_single_answer(name):
    """Such entries hold None for an answer, of which "None" was once taken for the text."""
    task = make_gym(name)
    assert task.prompt("train", 3, 0).answer != "None" and reward(task, 0, "None") < 0.5


@pytest.mark.parametrize("name", sorted(WITHOUT_ANSWERS))
def test_a_family_without_worked_answers_says_so(name):
    with pytest.raises(ConfigError, match=f"'{name}' has no worked answers to learn from: set sft.steps = 0"):
        task = make_gym(name)
        task.demonstration(task.prompt("train", 3, 0))
    assert "has no worked answers" in refusal(name=name, style="chat", options={"shots": 1})


def test_another_right_answer_is_right():
    task = make_gym("graph_color", "exact", num_colors=4, min_num_vertices=2, max_num_vertices=2)
    colours = json.loads(task.prompt("train", 3, 0).answer)
    other = json.dumps({vertex: 5 - colour for vertex, colour in colours.items()})
    assert other != task.prompt("train", 3, 0).answer and reward(task, 0, other) == 1


# the two scorings


@pytest.mark.parametrize(("name", "answer"), FOR_PART.items())
def test_exact_does_not_pay_in_part(name, answer):
    """And is the default of these families. What is right is the same in both, so held-out accuracy is, too."""
    family, exact = make_gym(name, "family"), make_gym(name)
    paid = [reward(family, index, answer) for index in range(16)]
    assert sum(0 < each < 1 for each in paid) > 3
    assert [reward(exact, index, answer) for index in range(16)] == [float(correct(each)) for each in paid]


@pytest.mark.confirms
@pytest.mark.parametrize("name", usable_families())
def test_no_family_pays_for_an_answer_that_says_nothing(name):
    """The empty one, 0 where it is wrong, nan, the question, a list of guesses with the right answer among them."""
    dataset = make_dataset(name, 17)
    exact = default_scoring(name) == "exact"
    score = partial(exact_score, name, dataset) if exact else partial(family_score, name, dataset)
    assert garbage_pay(name, score) == 0


def test_a_list_of_guesses_is_none_of_them():
    task = make_gym("word_sorting")
    right = task.prompt("train", 3, 0).answer
    other = task.prompt("train", 3, 1).answer
    assert reward(task, 0, right) == 1 and reward(task, 0, f"{right}, {other}") == 0
    assert reward(task, 0, f"{right} {right}") == 0 and reward(task, 0, f" {right}\n") == 1


def test_a_family_that_pays_constants_little_keeps_its_own_scorer():
    task = make_gym("tower_of_hanoi")
    move = task.prompt("train", 3, 0).answer.splitlines()[0]
    assert task.score(task.prompt("train", 3, 0), [move]) == {"score": 0.05}
    assert reward(make_gym("tower_of_hanoi", "exact"), 0, move) == 0


def test_compact_answers_are_exact_unless_asked_otherwise():
    index, said = 0, "1 2 3 4 5 6 7 8 9"
    assert reward(make_gym("gcd", style="compact"), index, said) == 0
    assert 0 < reward(make_gym("gcd", "family", "compact"), index, said) < 0.5


def test_scoring_is_a_key_of_the_toml():
    assert load_config(None, {"task": {"scoring": "exact"}}).task.scoring == "exact"
    with pytest.raises(ConfigError, match="task.scoring = 'exakt'"):
        load_config(None, {"task": {"scoring": "exakt"}})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            dict(name="jsonl"),
            "task.scoring = 'exact' is of reasoning-gym families alone, and task.name = 'jsonl' is none",
        ),
        (dict(name="my_task:Mine"), "task.name = 'my_task:Mine' is none: leave it out"),
        (dict(name="gcd", reward="my:reward"), "task.reward = 'my:reward' takes its place: keep one of them"),
    ],
)
def test_what_is_scored_otherwise_takes_no_scoring(settings, said):
    assert said in refusal(scoring="exact", **settings)


@pytest.mark.parametrize("name", sorted(PAYS_FOR_NOTHING))
def test_a_scorer_that_pays_in_full_for_nothing_is_refused(name):
    said = refusal(name=name, style="chat", scoring="family")
    assert f"task.scoring = 'family' is refused for '{name}'" in said and "leave it out" in said


# what a constant earns


def test_the_table_is_of_the_installed_families():
    assert json.loads(TABLE.read_text())["reasoning_gym"] == version("reasoning-gym")
    assert list(measured()) == usable_families()
    assert all(0 <= pay.exact <= pay.family <= 1 for pay in measured().values())


@pytest.mark.parametrize(
    "name",
    [
        *("circuit_logic", "rectangle_count", "time_intervals", "polynomial_equations"),
        *("chain_sum", "coin_flip", "gcd", "tower_of_hanoi", "word_sorting"),
    ],
)
def test_the_table_says_what_is_measured(name):
    assert constant_pay(name)._asdict() == measured()[name]._asdict()


def test_the_default_follows_the_table(monkeypatch):
    for name, pay in measured().items():
        pays_little = pay.family <= LARGEST_PAY and not pay.garbage
        is_called = has_own_scorer(name) and name not in RUNS_THE_ANSWER
        assert default_scoring(name) == ("family" if is_called and pays_little else "exact")
    assert {default_scoring(name) for name in usable_families()} == {"exact", "family"}
    assert default_scoring("tower_of_hanoi") == "family"
    monkeypatch.setattr("titan_rl.environments.reasoning_gym.constant_answers.measured", dict)
    assert default_scoring("tower_of_hanoi") == "exact" and constant_answers.pays_for_little("tower_of_hanoi")


def test_the_list_of_tasks_tells_it(capsys):
    assert main(["tasks"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    pay = measured()["rectangle_count"]
    assert "scored exact; " in lines["rectangle_count"]
    assert f"earns {pay.family:.2f} by its scorer, {pay.exact:.2f} exact" in lines["rectangle_count"]
    assert "compact (exact) too" in lines["gcd"] and "scored family;" in lines["tower_of_hanoi"]
    assert main(["tasks", "--json"]) == 0
    [found] = [task for task in json.loads(capsys.readouterr().out) if task["name"] == "rectangle_count"]
    assert found == {
        "name": "rectangle_count",
        "styles": ["chat"],
        "scoring": "exact",
        "constant_answer": pay._asdict(),
    }
