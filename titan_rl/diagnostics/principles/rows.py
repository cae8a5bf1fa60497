"""Rows to train on that a constitution made, in the shapes that ``data.file`` takes. Pure.

revisions.jsonl   prompt, completion          sft
pairs.jsonl       prompt, chosen, rejected    dpo, simpo, orpo, reward_model
"""

from collections.abc import Iterable, Iterator, Sequence

from titan_rl.data.text.messages import message
from titan_rl.diagnostics.principles.stages import Compared, Made, Revised
from titan_rl.records.preferences.rows import Row, row_of

REVISIONS, PAIRS = "revisions.jsonl", "pairs.jsonl"
FILES = (REVISIONS, PAIRS)


def rows_of(made: Sequence[Made]) -> dict[str, list[Row]]:
    """Rows by the name of their file, in the order of the prompts."""
    revised = (each.revised for each in made if each.revised is not None)
    compared = (each for of_prompt in made for each in of_prompt.compared)
    return {REVISIONS: list(_revisions(revised)), PAIRS: list(_pairs(compared))}


def _revisions(revised: Iterable[Revised]) -> Iterator[Row]:
    for each in revised:
        if each.lost is None:
            answer = [message("assistant", each.answer)]
            yield row_of(each.prompt, completion=answer, principles=list(each.principles))


def _pairs(compared: Iterable[Compared]) -> Iterator[Row]:
    for each in compared:
        if each.choice in ("a", "b"):
            chosen, rejected = each.item.answers if each.choice == "a" else each.item.answers[::-1]
            yield row_of(each.item, chosen=chosen, rejected=rejected, principle=each.principle)
