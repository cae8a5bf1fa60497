"""Stages of a constitution, for one prompt: answers, critiques and revisions, comparisons. Pure but for what is asked.

    prompt ─▶ answer ─▶ critique by a principle ─▶ revision ─▶ ... N rounds ─▶ a row of SFT
    prompt ─▶ two answers ─▶ the judge's comparison by a principle, in both orders ─▶ a pair, or why there is none

Each question has a name, by which its principle is drawn and its reply recorded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from titan_rl.data.text.messages import message
from titan_rl.diagnostics.principles.asking import Ask, Question, Reply, asked
from titan_rl.diagnostics.principles.constitution import Constitution, drawn
from titan_rl.diagnostics.principles.verdicts import (
    Comparison,
    Place,
    comparison_of,
    is_too_long,
    question,
    verdict,
)
from titan_rl.mesh.processes.deadlines import together
from titan_rl.records.preferences.items import Item, shown

Loss = Literal["answer", "critique", "revision"]
"""Reply of a chain that did not end by itself, or is empty."""


@dataclass(frozen=True)
class Stages:
    """Settings of all stages."""

    constitution: Constitution
    seed: int
    samples: int
    """Answers to each prompt that are compared, two by two; 0: none."""
    revisions: int
    """Rounds of critique and revision; 0: none."""
    temperature: float
    """Of answers, critiques and revisions; a judge is asked greedily."""

    @property
    def num_answers(self) -> int:
        return max(self.samples, min(self.revisions, 1))


@dataclass(frozen=True)
class Revised:
    """Revision of an answer."""

    prompt: Item
    answer: str
    """The last revision."""
    principles: tuple[str, ...] = ()
    """Names, in the order of the rounds."""
    lost: Loss | None = None
    """Reply that is missing; then there is no row."""


@dataclass(frozen=True)
class Compared:
    """A judge's comparison of two answers."""

    item: Item
    """Its prompt and both answers."""
    principle: str
    choice: Comparison
    places: tuple[Place, ...] = ()
    """Verdicts that could be read: the place of the answer that each prefers."""


@dataclass(frozen=True)
class Made:
    """Everything that was made of a prompt."""

    revised: Revised | None
    compared: list[Compared]
    uncompared: int
    """Pairs of answers that are alike, or of which one did not end by itself."""


async def make(stages: Stages, ask: Ask, judge: Ask, prompt: Item) -> Made:
    """All stages of a prompt, which has an id and no answers."""
    answers = await together(ask(to_answer(stages, prompt, number)) for number in range(stages.num_answers))
    revised = await revise(stages, ask, prompt, answers[0]) if stages.revisions else None
    pairs = list(_pairs(prompt, answers[: stages.samples]))
    names = [f"prompt/{prompt.id}/pair/{number}" for number, _ in pairs]
    compared = await together(compare(stages, judge, name, item) for name, (_, item) in zip(names, pairs, strict=True))
    return Made(revised, compared, stages.samples // 2 - len(pairs))


def to_answer(stages: Stages, prompt: Item, number: int) -> Question:
    """Question that an answer to a prompt replies to."""
    return _asked(stages, prompt, f"answer/{number}", [])


def _asked(stages: Stages, prompt: Item, stage: str, turns: Sequence[str]) -> Question:
    """Question of a prompt's conversation. ``turns``: what was said since, the model's first."""
    assert not isinstance(prompt.prompt, str), "a prompt of a chat model is messages"
    said_since = [message(("assistant", "user")[place % 2], text) for place, text in enumerate(turns)]
    name = f"prompt/{prompt.id}/{stage}"
    return Question(name, [*prompt.prompt, *said_since], stages.temperature, prompt.tools, prompt.template_options)


async def revise(stages: Stages, ask: Ask, prompt: Item, answer: Reply) -> Revised:
    """Revisions of an answer, each round's by another draw of a principle; the last one counts."""
    text, names = answer.text, []
    if not answer.is_whole:
        return Revised(prompt, text, lost="answer")
    for number in range(stages.revisions):
        principle = drawn(stages.constitution.of_revisions, "revision", stages.seed, prompt.id, number)
        names.append(principle.name)
        turns = [text, principle.critique or ""]
        critique = await ask(_asked(stages, prompt, f"critique/{number}", turns))
        if not critique.is_whole:
            return Revised(prompt, text, tuple(names), "critique")
        turns += [critique.text, principle.revision or ""]
        revision = await ask(_asked(stages, prompt, f"revision/{number}", turns))
        if not revision.is_whole:
            return Revised(prompt, text, tuple(names), "revision")
        text = revision.text
    return Revised(prompt, text, tuple(names))


def _pairs(prompt: Item, answers: Sequence[Reply]) -> Iterator[tuple[int, Item]]:
    """Numbers and items of each two answers that are whole and differ."""
    for number, (one, other) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
        if one.is_whole and other.is_whole and one.text.strip() != other.text.strip():
            yield number, with_answers(prompt, one.text, other.text)


def with_answers(prompt: Item, *answers: str) -> Item:
    """Item of a prompt of messages with answers to it."""
    return Item(
        prompt.prompt,
        tuple([message("assistant", answer)] for answer in answers),
        prompt.source,
        id=prompt.id,
        tools=prompt.tools,
        template_options=prompt.template_options,
    )


# the judge


async def compare(stages: Stages, judge: Ask, name: str, item: Item) -> Compared:
    """A judge's comparison of an item's two answers by one principle, asked in both orders."""
    principle = drawn(stages.constitution.of_comparisons, "comparison", stages.seed, name)
    conversation, answers = shown(item.prompt), [shown(answer) for answer in item.answers]
    if is_too_long(conversation, answers):
        return Compared(item, principle.name, "too_long")
    orders = {"forward": answers, "backward": answers[::-1]}
    replies = await together(
        judge(asked(f"{name}/{order}", question(conversation, pair, principle.comparison or "")))
        for order, pair in orders.items()
    )
    if any(reply.status in ("too_long", "refused") for reply in replies):
        return Compared(item, principle.name, "too_long")
    if any(reply.status == "cut" for reply in replies):
        return Compared(item, principle.name, "cut")
    places: list[Place | None] = [verdict(reply.text) for reply in replies]
    readable: list[Place] = [place for place in places if place is not None]
    return Compared(item, principle.name, comparison_of(*places), tuple(readable))
