"""Estimators of repeated sampling against their definitions, and the files of an evaluation."""

import json
import random
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest

from titan_rl.records.evaluations.estimators import estimate, majority_at, pass_at
from titan_rl.records.evaluations.files import write_result
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult
from titan_rl.records.evaluations.tables import table


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    cases = random.Random(1)
    for _ in range(1000):
        right = [cases.random() < 0.3 for _ in range(cases.randint(1, 9))]
        k = cases.randint(1, len(right))
        subsets = list(combinations(right, k))
        assert pass_at(k, len(right), sum(right)) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_one_is_the_mean_and_pass_at_n_asks_for_any():
    for n in range(1, 30):
        for c in range(n + 1):
            assert pass_at(1, n, c) == pytest.approx(c / n)
            assert pass_at(n, n, c) == float(c > 0)


def test_pass_at_k_of_many_samples_is_exact():
    """The product of Chen et al.'s own program, in logarithms."""
    n, c, k = 2000, 3, 100
    logs = np.log1p(-k / np.arange(n - c + 1, n + 1)).sum()
    assert pass_at(k, n, c) == pytest.approx(1 - np.exp(logs), rel=1e-12)


def test_a_majority_is_what_a_random_order_of_ties_gives():
    cases = random.Random(2)
    for _ in range(300):
        votes = [cases.choice(["a", "b", "c", None]) for _ in range(cases.randint(1, 8))]
        correct = [vote == "a" for vote in votes]
        counts = {vote: votes.count(vote) for vote in votes if vote is not None}
        winners = [vote for vote, count in counts.items() if count == max(counts.values())]
        expected = sum(vote == "a" for vote in winners) / len(winners) if winners else 0.0
        assert majority_at(votes, correct) == pytest.approx(expected)


def test_a_majority_is_right_by_the_share_of_its_samples_that_are():
    assert majority_at(["7", "7", "7", "8"], [True, False, True, True]) == pytest.approx(2 / 3)


def test_an_interval_covers_as_often_as_it_says():
    """Means of 60 questions from a known distribution; 200 of them put the share within 5 points, mostly."""
    draws = np.random.RandomState(3)
    covered = 0
    for number in range(200):
        values = draws.binomial(4, 0.3, size=60) / 4
        found = estimate(list(values), str(number))
        assert found.low <= found.value <= found.high and found.value == pytest.approx(values.mean())
        covered += found.low <= 0.3 <= found.high
    assert 0.89 <= covered / 200 <= 0.99


def test_an_interval_is_the_same_when_it_is_made_again():
    values = [0.0, 0.25, 1.0, 0.5]
    assert estimate(values, "avg@4") == estimate(values, "avg@4")


@pytest.mark.parametrize(
    ("values", "interval"), [([0.0] * 2, (0.0, 0.6576)), ([1.0], (0.2065, 1.0)), ([0.5] * 4, None)]
)
def test_questions_that_are_all_alike_prove_little(values, interval):
    """By resampling alone the interval would have no width; expected ones by R's prop.test(correct = FALSE)."""
    found = estimate(values, "avg@1")
    assert found.value == values[0] and found.low <= values[0] <= found.high and found.high - found.low > 0.5
    assert interval is None or (found.low, found.high) == pytest.approx(interval, abs=1e-4)


def answer(sample: int, final: str | None, *, right: bool, flexible: bool, status: str = "ok") -> Answer:
    return Answer(sample, f"so {final}", final, right, float(right), status, 3 + sample, {"flexible": flexible})


@pytest.fixture
def result() -> SuiteResult:
    """Two questions of four answers, of which 2 and 0 are right, and one that was not scored."""
    first = [answer(n, "7" if n < 2 else "8", right=n < 2, flexible=True) for n in range(4)]
    second = [answer(n, None, right=False, flexible=n == 0, status="truncated") for n in range(4)]
    questions = [Question("eval/s/0", "3 + 4?", "7", first), Question("eval/s/1", "2?", "2", second)]
    return SuiteResult("s", 2, 4, True, questions, {"eval/s/2": "the engine died"}, {"seed": 1})


def test_a_suites_metrics_have_its_name_and_its_numbers(result):
    assert result.metrics == pytest.approx(
        {
            "eval/s/avg@4": 1 / 4,
            "eval/s/pass@2": (5 / 6) / 2,  # of six pairs of the first one is wrong
            "eval/s/majority@4": 1 / 4,  # a tie, and a question on which all abstain
            "eval/s/flexible/avg@4": 5 / 8,
            "eval/s/flexible/pass@2": (1 + 1 / 2) / 2,
            "eval/s/truncated": 1 / 2,
            "eval/s/response_length": 4.5,
            "eval/s/unscored": 1,
        }
    )
    assert "pass@2 41.7%" in str(result) and "1 more could not be scored" in str(result)


def test_answers_that_could_not_be_scored_in_time_are_told(result):
    result.questions[1].answers[2:] = [answer(n, None, right=False, flexible=False, status="timeout") for n in (2, 3)]
    assert "of the answers 2 of 8 could not be scored within verifier.score_timeout and count as wrong" in str(result)
    assert result.metrics["eval/s/timeouts"] == 2
    assert any(line.split()[2:] == ["timeouts,", "as", "wrong", "2"] for line in table([result]).splitlines())


def test_files_hold_every_answer_and_every_estimate(result, tmp_path):
    write_result(tmp_path / "new", result)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["s.json", "s.parquet"]
    record = json.loads((tmp_path / "new" / "s.json").read_text())
    assert {name: each["value"] for name, each in record["metrics"].items()} == {
        name: each.value for name, each in result.estimates.items()
    }
    assert record["unscored"] == {"eval/s/2": "the engine died"} and record["settings"] == {"seed": 1}
    rows = pq.read_table(tmp_path / "new" / "s.parquet").to_pylist()
    assert len(rows) == 8 and [row["sample"] for row in rows] == [0, 1, 2, 3] * 2
    assert rows[0] | {"num_tokens": None} == {
        **{"suite": "s", "question_id": "eval/s/0", "sample": 0, "question": "3 + 4?", "expected": "7"},
        **{"answer": "so 7", "final": "7", "correct": True, "reward": 1.0, "status": "ok", "num_tokens": None},
        "readings": [("flexible", True)],
    }


def test_a_table_has_a_line_for_each_estimate(result):
    lines = table([result]).splitlines()
    assert len(lines) == 1 + len(result.estimates) + 3
    assert len({line.index(word) for line, word in ((lines[0], "value"), (lines[1], "25.0%"))}) == 1
