"""Bench of the best constant answer, and of empty answers, in each reasoning-gym family.

    titan-rl bench constant-answers [--task.name gcd]
    python -m titan_rl.diagnostics.bench.models.constant_answers       # writes constant_answers.json anew

All families take about five minutes.

Dimensions: N rows.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from typing import Any

from titan_rl.compat.reasoning_gym import families
from titan_rl.data.storage.files import replace_text
from titan_rl.environments.reasoning_gym.constant_answers import TABLE, ConstantPay
from titan_rl.environments.reasoning_gym.families import (
    IS_OF_OTHERS,
    check_name,
    exact_score,
    family_score,
    make_dataset,
    usable_families,
    worked_answer,
)

NUM_ROWS = 200
_SEED = 17
_NUM_GOLD = 20
"""Right answers of other rows that are tried on all rows: the most frequent, and the first."""
_NUM_GARBAGE_ROWS = 12
_SHOWN_CHARACTERS = 60
GUESSES = (
    *("", "-", "?", "nan", "inf", "None", "N/A", "I don't know"),
    *map(str, range(-1, 21)),
    *("50", "100", "1000", "0.0", "0.5", "1.0", "1/2", "1 2 3 4 5 6 7 8 9 10"),
    *("True", "False", "true", "false", "Yes", "No", "yes", "no"),
    *("A", "B", "C", "a", "x", "P", "Q", "(P ∨ Q)", "(P → Q)", "(P ∨ ¬P)", "x = 0", "left", "up"),
    *("[]", "[0]", "[[]]", "[[0]]", "{}", "()", "()()", "0 0"),
    *("00:00", "12:00", "10:00:00", "1 days", "0 days, 12:00"),
    *("infeasible", "impossible", "invalid", "heads", "tails", "knight"),
)
"""Answers of all families' kinds."""


def constant_pay(name: str, num_rows: int = NUM_ROWS) -> ConstantPay:
    """Reward of constant answers of one family, over ``num_rows`` rows, the same at every call.

    Errors: ConfigError for a family that is unknown or refused.
    """
    check_name(name, "chat")
    with redirect_stdout(sys.stderr):  # some families print what they think of an answer
        return _measure(name, num_rows)


def _measure(name: str, num_rows: int) -> ConstantPay:
    dataset = make_dataset(name, _SEED)
    entries_N = [dataset[index] for index in range(num_rows)]
    gold = [str(entry["answer"]) for entry in entries_N]
    frequent = [answer for answer, _ in Counter(gold).most_common(_NUM_GOLD)]
    answers = dict.fromkeys(answer.strip() for answer in (*GUESSES, *frequent, *gold[:_NUM_GOLD]))

    def best(score: Callable[[dict, str], float]) -> tuple[float, str]:
        means = {answer: sum(score(entry, answer) for entry in entries_N) / num_rows for answer in answers}
        answer = max(means, key=lambda answer: means[answer])
        return round(means[answer], 4), answer[:_SHOWN_CHARACTERS]

    garbage = round(garbage_pay(name, partial(family_score, name, dataset)), 4)
    return ConstantPay(*best(partial(family_score, name, dataset)), *best(partial(exact_score, name, dataset)), garbage)


def garbage_pay(name: str, score: Callable[[dict, str], float]) -> float:
    """Largest reward of a meaningless answer, over the family's first rows."""
    dataset = make_dataset(name, _SEED)
    entries_N = [dataset[index] for index in range(_NUM_GARBAGE_ROWS)]
    right_N = [str(worked_answer(name, entry) or "").strip() for entry in entries_N]
    return max(
        score(entry, answer)
        for index, entry in enumerate(entries_N)
        for answer in _garbage(entry["question"], right_N[index:] + right_N[:index])
        if not _same(answer, right_N[index])
    )


def _same(answer: str, right: str) -> bool:
    """As text, or as numbers: 0 is 0.0."""
    try:
        return answer == right or float(answer) == float(right)
    except ValueError:
        return False


def _garbage(question: str, guesses: list[str]) -> Iterator[str]:
    """``guesses``: the right answer first."""
    yield from ("", "0", "nan", question.strip())
    for separator in (" ", ", ", "\n"):
        for listed in (guesses, guesses[1:] + guesses[:1]):
            yield separator.join(listed).strip()
    yield " ".join(GUESSES)
    yield json.dumps(guesses)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the bench: of ``task.name``, or of all families."""
    name = overrides.get("task", {}).get("name")
    names = [name] if name else usable_families()
    return [{"name": name, "unit": "mean score", **constant_pay(name)._asdict()} for name in names]


def main() -> None:
    pays = {name: constant_pay(name)._asdict() for name in sorted(set(families()) - IS_OF_OTHERS)}
    lines = [f"    {json.dumps(name)}: {json.dumps(pay)}" for name, pay in pays.items()]
    head = {"reasoning_gym": version("reasoning-gym"), "rows": NUM_ROWS, "seed": _SEED}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "families": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    replace_text(TABLE, text)


if __name__ == "__main__":
    main()
