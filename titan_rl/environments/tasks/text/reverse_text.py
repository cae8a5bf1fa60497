"""Reversed text: a few words of a story are to be written backwards, character by character.

    compact   the sea>              aes eht
    chat      ... the sea           <reversed_text>aes eht</reversed_text>
    spaced    ... s e a             <reversed_text>a e s</reversed_text>

The reward is the similarity of what is written and what is expected, so that a nearly right answer earns more than
none. It has a floor, that of prime-rl's reward too: with three to eight words a constant `` eht fo dna`` earns 0.28 on
average, the text as it was asked 0.24, each word reversed in its place 0.44. Held-out accuracy counts exact answers.
Words are of a story that comes with reasoning-gym (Jules Verne and Michel Verne, In the Year 2889).
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from string import ascii_lowercase
from typing import Annotated

from pydantic import Field

from titan_rl.compat.reasoning_gym import part
from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task

PASSAGE = 16
"""Words of a passage; a prompt's are of one passage, and a passage is held out as a whole."""
_FEW_WORDS = 3
"""Fewer words than these come in many passages, so that a text of so few is held out by itself."""
_ASKED = "Reverse this text character by character, and give the reversed text within <reversed_text> tags:\n\n{text}"
_TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
_STORY = re.compile(r"\*\*\* START OF.*?\*\*\*(.*)\*\*\* END OF", re.DOTALL)
_LONGEST = 2
"""How many times as long as the expected text an answer may be and still be compared."""


@cache
def passages() -> tuple[tuple[str, ...], ...]:
    """Passages of the story, each of as many words of ASCII."""
    text = part("data").read_data_file("in_the_year_2889.txt")
    story = match[1] if (match := _STORY.search(text)) else text
    words = [word for word in story.split() if word.isascii() and word.isprintable()]
    return tuple(tuple(words[start : start + PASSAGE]) for start in range(0, len(words) - PASSAGE + 1, PASSAGE))


def similarity(answer: Sequence[str], expected: Sequence[str]) -> float:
    """Ratio of matching elements, 0 to 1 (difflib, Ratcliff and Obershelp); 0 for an answer twice as long."""
    if len(answer) > _LONGEST * len(expected):
        return 0.0
    return SequenceMatcher(None, answer, expected, autojunk=False).ratio()


def _random_word(draw: random.Random, max_characters: int) -> str:
    return "".join(draw.choices(ascii_lowercase, k=draw.randint(1, max_characters)))


@dataclass(kw_only=True)
class ReverseTextOptions:
    """``[task.options]`` of reversed text."""

    min_words: Annotated[int, Field(ge=1, le=PASSAGE)] = 3
    """Fewest words of a prompt."""
    max_words: Annotated[int, Field(ge=1, le=PASSAGE)] = 8
    """Most words of a prompt."""
    max_characters: Annotated[int, Field(ge=1, le=40)] = 40
    """Most characters of a word; longer ones are left out."""
    random_words: bool = False
    """Whether words are letters at random, one to ``max_characters`` each, and none of the story's: for models that
    would know its few words by heart."""
    spaced: bool = False
    """Whether a space stands between all characters, so that a tokenizer gives each a token of its own: for models that
    do not know how their tokens are spelled."""


def _with_words(options: ReverseTextOptions) -> list[tuple[str, ...]]:
    """Passages without longer words, where enough are left."""
    short = [tuple(word for word in each if len(word) <= options.max_characters) for each in passages()]
    return [each for each in short if len(each) >= options.max_words]


class ReverseTextTask(Task):
    """Endless task of text to reverse; one passage in five is held out, by a hash. Errors: ConfigError."""

    ABOUT = "text to write backwards, rewarded by similarity: task.options.min_words, max_words, ..."
    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(ReverseTextOptions, task.options, "task.options")
        if self.options.min_words > self.options.max_words:
            raise ConfigError(
                f"task.options.min_words = {self.options.min_words} is more than max_words = "
                f"{self.options.max_words}: lower it"
            )
        self._passages = [] if self.options.random_words else _with_words(self.options)
        if not (self._passages or self.options.random_words):
            raise ConfigError(
                f"task.options.max_characters = {self.options.max_characters}: no passage has max_words = "
                f"{self.options.max_words} words as short: raise it"
            )

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        draw = random.Random(f"{stream} {seed} {index}")
        options = self.options
        if options.random_words:
            count = draw.randint(options.min_words, options.max_words)
            passage = words = tuple(_random_word(draw, options.max_characters) for _ in range(count))
        else:
            passage = draw.choice(self._passages)
            count = draw.randint(options.min_words, options.max_words)
            start = draw.randint(0, len(passage) - count)
            words = passage[start : start + count]
        text = " ".join(words)
        text = " ".join(text) if options.spaced else text
        return Prompt(f"{stream}/{index:07d}", text, text[::-1], {"passage": " ".join(passage)})

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.entry["passage"] if self.options.min_words >= _FEW_WORDS else prompt.text)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return f"{prompt.text}>"
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", _ASKED.format(text=prompt.text))]

    def demonstration(self, prompt: Prompt) -> str:
        return prompt.answer if self.style == "compact" else f"<reversed_text>{prompt.answer}</reversed_text>"

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score the last answer; with a chat model, what its only pair of tags holds."""
        answer = answers[-1]
        if self.style == "chat":
            tagged = _TAGGED.findall(answer)
            answer = tagged[0].strip() if len(tagged) == 1 else ""
        if self.options.spaced:  # by characters: spaces alone would match half of any answer
            return {"similarity": similarity(answer.split(" "), prompt.answer.split(" "))}
        return {"similarity": similarity(answer, prompt.answer)}
