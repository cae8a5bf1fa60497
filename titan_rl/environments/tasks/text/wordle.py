"""Wordle: a secret word of five letters is guessed in a few turns; each guess is answered letter by letter.

    compact   >    crane  --y--  slimy  -----  ...
    chat      Guess a word of five letters ...   <guess>crane</guess>   crane: c absent, r absent, a present, ...

Feedback has a character for each letter: ``g`` stands where the secret word has it, ``y`` is elsewhere in the word,
``-`` is not in it, or not that often. A guess that is no word of five letters costs its turn. The secret stays in the
environment. Words are those of reasoning-gym's list. With ``candidates`` the prompt lists some, of which one is the
secret: what a small model can play.

A worked example draws each guess from the words that are consistent with all feedback so far, and takes the secret as
its last, whatever the feedback leaves. No word of it is held out, but for the secret of a held-out prompt.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from pydantic import Field

from titan_rl.compat.reasoning_gym import part
from titan_rl.config.load import build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task

LETTERS = 5
_GUESS = re.compile(r"<guess>(.*?)</guess>", re.DOTALL)
_WORD = re.compile(rf"[a-z]{{{LETTERS}}}")
_MEANINGS = {"g": "right place", "y": "other place", "-": "absent"}
_ASKED = (
    "Guess a secret English word of five letters. You have {turns} guesses. After each you are told of every letter "
    "whether it is in the right place, in another place, or absent. Give each guess within <guess> tags, such as "
    "<guess>crane</guess>, and nothing behind it."
)
_CANDIDATES = " The word is one of these: {words}."
_NO_GUESS = {"compact": "?????\n", "chat": "That is no word of five letters within one pair of <guess> tags."}


@cache
def secret_words() -> tuple[str, ...]:
    """Words that are guessed."""
    return tuple(word for word in part("data.wordle_words").wordle_words if _WORD.fullmatch(word))


@cache
def training_words() -> tuple[str, ...]:
    """Words that are not held out."""
    return tuple(word for word in secret_words() if not is_held_out(word))


def feedback(guess: str, secret: str) -> str:
    """Feedback on a guess, a character a letter: each counts as often as the secret has it, right places first."""
    left = Counter(wanted for mine, wanted in zip(guess, secret, strict=True) if mine != wanted)
    found = []
    for mine, wanted in zip(guess, secret, strict=True):
        is_elsewhere = mine != wanted and left[mine] > 0
        left[mine] -= is_elsewhere
        found.append("g" if mine == wanted else "y" if is_elsewhere else "-")
    return "".join(found)


def consistent(words: Iterable[str], guess: str, secret: str) -> list[str]:
    """Words for which a guess would have had the feedback that it has for the secret."""
    given = feedback(guess, secret)
    return [word for word in words if feedback(guess, word) == given]


@dataclass(kw_only=True)
class WordleOptions:
    """``[task.options]`` of Wordle."""

    max_turns: Annotated[int, Field(ge=1, le=20)] = 6
    """Guesses after which the game is lost."""
    credit_for_letters: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """What the best guess of a lost game earns for each letter in its place, a fifth of it."""
    candidates: Annotated[int, Field(ge=0, le=100)] = 0
    """Words of which one is the secret, listed in the prompt; 0: the prompt lists none."""


class WordleTask(Task):
    """Endless task of secret words; one word in five is held out, by a hash. Errors: ConfigError."""

    ABOUT = "a word of five letters, guessed in turns: task.options.max_turns, candidates, ..."
    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(WordleOptions, task.options, "task.options")

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        """Prompt of a secret word; its text names the word for records, and the model does not see it."""
        draw = random.Random(f"{stream} {seed} {index}")
        secret = draw.choice(secret_words())
        if not self.options.candidates:
            return Prompt(f"{stream}/{index:07d}", f"wordle {secret}", secret, {})
        others = [word for word in draw.sample(training_words(), self.options.candidates) if word != secret]
        candidates = [*others[: self.options.candidates - 1], secret]
        draw.shuffle(candidates)
        text = f"wordle {secret} of {' '.join(candidates)}"
        return Prompt(f"{stream}/{index:07d}", text, secret, {"candidates": candidates})

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.answer)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        candidates = prompt.entry.get("candidates", [])
        if self.style == "compact":
            return f"{' '.join(candidates)}>"
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        listed = _CANDIDATES.format(words=", ".join(candidates)) if candidates else ""
        return [*system, message("user", _ASKED.format(turns=self.options.max_turns) + listed)]

    def demonstration(self, prompt: Prompt) -> list[str]:
        """Consistent guesses, the secret last."""
        draw, guesses = random.Random(f"guesses {prompt.id} {prompt.answer}"), list[str]()
        words: Iterable[str] = prompt.entry.get("candidates") or training_words()
        left = sorted({*words, prompt.answer})
        while len(guesses) < self.options.max_turns - 1 and prompt.answer not in guesses:
            guesses.append(draw.choice(left))
            left = consistent(left, guesses[-1], prompt.answer)
        guesses += [] if prompt.answer in guesses else [prompt.answer]
        return guesses if self.style == "compact" else [f"<guess>{guess}</guess>" for guess in guesses]

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        guess = self.guess(answers[-1])
        if guess == prompt.answer or len(answers) >= self.options.max_turns:
            return None
        if guess is None:
            return _NO_GUESS[self.style]
        given = feedback(guess, prompt.answer)
        if self.style == "compact":
            return f"{given}\n"
        told = (f"{letter} {_MEANINGS[mark]}" for letter, mark in zip(guess, given, strict=True))
        return f"{guess}: {', '.join(told)}"

    def guess(self, answer: str) -> str | None:
        """Word that an answer guesses; None if it is no word of five letters, or there are several."""
        tagged = [answer] if self.style == "compact" else _GUESS.findall(answer)
        word = tagged[0].strip().lower() if len(tagged) == 1 else ""
        return word if _WORD.fullmatch(word) else None

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score of a game: 1 if won, else the credit of its best guess."""
        guesses = [guess for answer in answers[: self.options.max_turns] if (guess := self.guess(answer)) is not None]
        if prompt.answer in guesses:
            return {"won": 1.0, "letters": 0.0}
        placed = max((feedback(guess, prompt.answer).count("g") for guess in guesses), default=0)
        return {"won": 0.0, "letters": self.options.credit_for_letters * placed / LETTERS}
