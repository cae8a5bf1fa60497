"""Scores of the best constant answer in each reasoning-gym family, measured and committed beside this file.

``titan-rl bench constant-answers`` measures it again (diagnostics/bench/models/constant_answers.py). It is told for a
family's default options, by two scorings: the family's own, and ``exact``, where only a full score counts. Beside it
stands what answers earn that say nothing: the empty one, ``nan``, the question itself, a list of guesses."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("constant_answers.json")
LARGEST_PAY = 0.1
"""Of a constant answer, by a family's own scorer, for which that scorer is still the default.

Above are those that pay for being near, or for each cell that happens to be right: game_of_life gives 0.96 for an
empty board. GRPO finds such an answer long before it finds the right one.
"""


class ConstantPay(NamedTuple):
    """Mean scores over the table's rows, each that of the answer which earns most."""

    family: float
    family_answer: str
    exact: float
    """What cannot be helped by scoring: a question with two answers pays 0.5 to one that never changes."""
    exact_answer: str
    garbage: float
    """The most that an answer which says nothing earns by the family's scorer."""


@cache
def measured() -> dict[str, ConstantPay]:
    """Measured scores by the name of the family."""
    families = json.loads(TABLE.read_text())["families"]
    return {name: ConstantPay(**pay) for name, pay in families.items()}


def pays_for_little(name: str) -> bool:
    """Whether a constant answer earns more than LARGEST_PAY, an empty one anything, or neither was measured."""
    pay = measured().get(name)
    return pay is None or pay.family > LARGEST_PAY or pay.garbage > 0
