"""reasoning-gym families by name: which are usable, how each is asked in few characters, how its answers are scored.

Families are scored in one of two ways: by the family's own scorer, many of which pay in part for wrong answers, or
``exact``, where only a right answer counts. Nine have scorers that run the model's answer as Python, and are always
scored ``exact``, by ours (checked_families.py).
``exact`` is the default where an answer that never changes would earn more than it should (constant_answers.py), and
for families without a scorer of their own: reasoning-gym's default pays for any string that holds the answer
somewhere, and models learn to write lists of guesses.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from titan_rl.compat.reasoning_gym import create_dataset
from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.plugins import meant_reference
from titan_rl.config.sections.schema import BUILT_IN_TASKS, MIXTURE, TASKS_OF_FILES, TASKS_OF_OTHERS
from titan_rl.environments.interfaces.task import correct
from titan_rl.environments.reasoning_gym.checked_families import RUNS_THE_ANSWER, checked_score, integrated
from titan_rl.environments.reasoning_gym.constant_answers import measured, pays_for_little
from titan_rl.environments.reasoning_gym.whole_families import WholeFamily

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset


BUILT_WHOLE = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""Families that are built whole, not by index (whole_families.py)."""
IS_OF_OTHERS = frozenset({"composite"})
"""What reasoning-gym makes of several families, as a mixture does here."""
PAYS_FOR_NOTHING = frozenset({"coin_flip", "complex_arithmetic", "game_of_life_halting"})
"""Families whose scorers give the full score to answers that say nothing: the right answer's text is asked for."""
TAKES_LISTS = frozenset(
    {
        "advanced_geometry",
        "fraction_simplification",
        "gsm_symbolic",
        "letter_jumble",
        "polynomial_equations",
        "sokoban",
        "spell_backward",
        "time_intervals",
        "word_sorting",
    }
)
"""Families whose scorers give the full score to a list of guesses that holds the right answer, too."""
WITHOUT_SCORER = frozenset(
    [
        *("acre", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation", "caesar_cipher"),
        *("count_bits", "count_primes", "course_schedule", "gcd", "isomorphic_strings", "largest_island", "lcm"),
        *("leg_counting", "letter_counting", "list_functions", "mahjong_puzzle", "maze", "modulo_grid"),
        *("number_filtering", "number_sequence", "ransom_note", "rotate_matrix", "rotten_oranges", "simple_equations"),
        *("simple_geometry", "string_manipulation", "string_splitting", "string_synthesis", "syllogism"),
        "word_sequence_reversal",
    ]
)
"""Families whose answers reasoning-gym scores by its default."""
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What families raise over answers and options that they cannot read."""
_SIZE = 2**31 - 1


def _expression(metadata: dict) -> str:
    return metadata["expression"].replace(" ", "") + "="


def _numbers(metadata: dict) -> str:
    return ",".join(map(str, metadata["numbers"])) + "="


COMPACT: dict[str, Callable[[dict], str]] = {
    "chain_sum": _expression,
    "count_bits": lambda metadata: f"{metadata['binary']}=",
    "decimal_chain_sum": _expression,
    "fraction_simplification": lambda metadata: f"{metadata['numerator']}/{metadata['denominator']}=",
    "gcd": _numbers,
    "lcm": _numbers,
    "products": _expression,
    "spell_backward": lambda metadata: f"{metadata['word']}=",
}
"""Families that can be asked in a few characters, from their metadata."""
_WORKED: dict[str, Callable[[dict], str]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""One right answer, from the metadata, of families whose questions have many."""


def usable_families() -> list[str]:
    return sorted(measured())


def described_families() -> list[dict[str, Any]]:
    """Descriptions of all usable families: name, styles, default scoring of chats, best constant answer."""
    return [
        {
            "name": name,
            "styles": ["compact", "chat"] if name in COMPACT else ["chat"],
            "scoring": default_scoring(name),
            "constant_answer": measured()[name]._asdict() if name in measured() else None,
        }
        for name in usable_families()
    ]


def check_name(name: str, style: str) -> None:
    """Check a family's name and style.

    Errors: ConfigError for a family that is unknown or refused, or that has no compact form.
    """
    if name in IS_OF_OTHERS:
        raise ConfigError(f"task.name = {name!r} is refused: set task.name = 'mixture', which has several families")
    if name not in usable_families():
        ours = (*TASKS_OF_FILES, *TASKS_OF_OTHERS, *BUILT_IN_TASKS, MIXTURE)
        known = {*usable_families(), *ours}
        raise ConfigError(f"task.name = {name!r} is unknown: {meant_reference(name) or nearest(name, known)}")
    if style == "compact" and name not in COMPACT:
        raise ConfigError(
            f"task.style = 'compact' is not defined for {name!r}: use 'chat', or one of {', '.join(sorted(COMPACT))}"
        )


def make_dataset(name: str, seed: int, **options: Any) -> "ProceduralDataset | WholeFamily":
    """Endless entries of a family, by index."""
    if name in BUILT_WHOLE:
        return WholeFamily(name, seed, **options)
    return create_dataset(name, seed=seed, size=_SIZE, **options)


def worked_answer(name: str, entry: dict) -> str | None:
    """Right answer of an entry; None if the family gives none."""
    if entry["answer"] is not None:
        return integrated(str(entry["answer"])) if name in RUNS_THE_ANSWER else str(entry["answer"])
    return _WORKED[name](entry["metadata"]) if name in _WORKED else None


def has_own_scorer(name: str) -> bool:
    return name not in WITHOUT_SCORER


def default_scoring(name: str) -> Literal["exact", "family"]:
    """Default scoring of chats; compact answers are exact by default."""
    is_exact = name in RUNS_THE_ANSWER or not has_own_scorer(name) or pays_for_little(name)
    return "exact" if is_exact else "family"


def family_score(name: str, dataset: "ProceduralDataset | WholeFamily", entry: dict, answer: str) -> float:
    """Score by the family's scorer, or by ours (checked_families.py) where that would run the answer."""
    if name in RUNS_THE_ANSWER:
        return checked_score(name, entry, answer)
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except UNREADABLE:  # some scorers stumble over answers that they cannot read
        return 0.0


def exact_score(name: str, dataset: "ProceduralDataset | WholeFamily", entry: dict, answer: str) -> float:
    """Exact score: 1 for a right answer, else 0.

    Right is what has the family's full score, so that a question may have several
    right answers; where its scorer does not tell, the right answer's text."""
    if name in RUNS_THE_ANSWER:
        return checked_score(name, entry, answer)
    if name in TAKES_LISTS and _has_room_for_two(answer, str(worked_answer(name, entry))):
        return 0.0
    if has_own_scorer(name) and name not in PAYS_FOR_NOTHING:
        return float(correct(family_score(name, dataset, entry, answer)))
    return text_score(entry, answer)


def _has_room_for_two(answer: str, right: str) -> bool:
    return len(answer.strip()) > 1.25 * len(right) + 1


def text_score(entry: dict, answer: str) -> float:
    """Text score: 1 for the right answer's text, else 0."""
    return float(answer.strip() == str(entry["answer"]))
