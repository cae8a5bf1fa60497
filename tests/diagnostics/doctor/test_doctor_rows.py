"""``titan-rl doctor --rows``: rows with one fault each are named, and no other. No actors."""

import json

import pytest

from titan_rl.cli import main

ADD = {"calc.py": "def add(a, b):\n    return a - b\n"}
REWARD = """
def number(prompt, completion, row):
    try:
        return float(float(completion) == float(row["answer"]))
    except ValueError:
        return 0.0


def anything(prompt, completion, row):
    if completion == "raise":
        raise KeyError("planted")
    return 1.0
"""


def run(folder, capsys, rows, arguments, count=0):
    """Exit code, and the report."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "run.toml").write_text(
        f'[run]\nplugin_path = ["{folder}"]\n[task]\nstyle = "compact"\n'
        f'{arguments}\n[task.options]\nfile = "rows.jsonl"\nheld_out_share = 0.5\n'
    )
    code = main(["doctor", str(folder / "run.toml"), "--rows", str(count), "--json"])
    return code, json.loads(capsys.readouterr().out)


def problems(report):
    return {row["row"].rpartition(" ")[2]: row["problem"] for row in report["rows"] if row["problem"]}


def answer(prompt, value):
    return {"prompt": prompt, "answer": value}


def test_rows_whose_own_answer_is_not_right_or_that_pay_for_nothing_are_named(tmp_path, capsys):
    rows = [answer(f"q{n}", str(n)) for n in range(12)]
    rows[3] |= {"answer": "three"}
    code, report = run(tmp_path, capsys, rows, 'name = "jsonl"\nreward = "rewards:number"')
    assert code == 1 and not report["healthy"] and len(report["rows"]) == 12
    assert problems(report) == {"4": "its own answer is not right"}
    assert [row["row"].rpartition(" ")[2] for row in report["rows"]] == [str(n + 1) for n in range(12)]
    rows[3] |= {"answer": "3"}
    code, report = run(tmp_path, capsys, rows, 'name = "jsonl"\nreward = "rewards:number"', count=5)
    assert code == 0 and report["healthy"] and len(report["rows"]) == 5
    rows[7] |= {"answer": "raise"}
    code, report = run(tmp_path, capsys, rows, 'name = "jsonl"\nreward = "rewards:anything"')
    found = problems(report)
    assert code == 1 and "planted" in found.pop("8")
    assert set(found.values()) == {"an empty answer earns as much"} and len(found) == 11


def issue(number, **columns):
    call = dict(function="calc:add", arguments=[1, 1], expected=2, when="FAIL_TO_PASS")
    return {
        "problem_statement": f"add subtracts, report {number}",
        "files": ADD,
        "calls": [call],
        "solution": ["sed -i s/-/+/ calc.py"],
    } | columns


@pytest.mark.parametrize("agent", ["", '[task.options.agent]\ncommand = "true"\n'])
def test_a_patch_that_mends_nothing_and_tests_that_pass_without_it_are_named(tmp_path, capsys, agent):
    passes = dict(function="calc:add", arguments=[1, 0], expected=1, when="FAIL_TO_PASS")
    rows = [issue(1), issue(2, solution=["true"]), issue(3, calls=[passes]), issue(4, setup="false")]
    table = f'name = "swe"\n{agent}'
    code, report = run(tmp_path, capsys, rows, table)
    found = problems(report)
    assert code == 1 and set(found) == {"2", "3", "4"}
    assert (found["2"], found["3"]) == ("its own answer is not right", "an empty answer earns as much")
    assert "setup ended with 1" in found["4"]


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["quickstart", "--rows", "0"], "give --rows a number"),
        (["quickstart", "--rows", "-1"], "or 0 for all"),
        (["dpo_tiny", "--rows", "1"], "--rows is of tasks"),
    ],
)
def test_what_has_no_rows_is_refused_in_one_line(arguments, mend, capsys):
    assert main(["doctor", *arguments]) == 2
    assert mend in capsys.readouterr().err


@pytest.mark.parametrize(("score", "is_told"), [("own", True), ("paid", True), ("unpaid", False)])
def test_answers_that_are_cut_are_told_where_they_are_right(tmp_path, capsys, score, is_told):
    pays = "completion == row['answer']" if score == "paid" else "completion == 'x'"
    (tmp_path / f"scores_{score}.py").write_text(f"def reward(prompt, completion, row): return float({pays})")
    reward = "" if score == "own" else f"scores_{score}:reward"
    rows = [answer(f"{n}?", f"{n:050d}") for n in range(8)]
    arguments = f'name = "jsonl"\nreward = "{reward}"\n[rollout]\nmax_new_tokens = 4'
    _, report = run(tmp_path, capsys, rows, arguments)
    assert ["rollout.max_new_tokens = 4" in line for line in report["notices"]] == [True] * is_told
