"""Multiple choice: rows of MMLU-Pro, MMLU and ARC. An answer ends with one line that names one letter.

    MMLU-Pro    question, options (list), answer (letter) or answer_index
    MMLU        question, choices (list), answer (index or letter)
    ARC         question, choices ({text, label}), answerKey

The last line is read by a grammar: what names two letters, denies one or adds anything but the option's own text names
none, so that no answer is paid for hedging.
"""

import re
from string import ascii_uppercase
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import shown
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.tasks.suites.base import SuiteTask, text_column

_SAID = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my) )?(?:final |correct |best )?(?:answer|option|choice)"
    r"(?: is)?:? ?(?:option |choice )?(.+)",
    re.IGNORECASE,
)
_LETTER = re.compile(r"\(?([A-Z])\)?(?:[.:)]? ?(.*))?")
_BOX = re.compile(r"\$?\\boxed\{(?:\\text\{)?([^{}]+)\}?\}\$?")
_LONGEST = 2000
"""Characters of a last line; a longer one names no letter."""


class MultipleChoiceTask(SuiteTask):
    """Task of questions with lettered options."""

    INSTRUCTION = 'Think step by step, and end with a line "Answer: X", where X is the letter of the right option.'

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow:
        question, options = text_column(place, columns, "question"), _options(place, columns)
        lines = "\n".join(f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
        letter = _right_letter(place, columns, options)
        return DataRow(place, columns, self._asked(f"{question}\n\n{lines}"), None, letter)

    def final(self, prompt: Prompt, answer: str) -> str | None:
        return read_letter(answer, _options(prompt.entry["place"], prompt.entry["row"]))

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if its last line names the right letter alone, else 0."""
        return {"right": float(self.final(prompt, answers[-1]) == prompt.answer)}


def read_letter(answer: str, options: list[str]) -> str | None:
    """Letter that the last line names; None unless it names one, of these options, and nothing else."""
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines or len(lines[-1]) > _LONGEST:
        return None
    last = " ".join(lines[-1].replace("*", "").split())
    if (said := _SAID.fullmatch(last)) is not None:
        last = said[1]
    if (box := _BOX.fullmatch(last.rstrip("."))) is not None:
        last = box[1].strip()
    match = _LETTER.fullmatch(last)
    if match is None or (place := ascii_uppercase.index(match[1])) >= len(options):
        return None
    return match[1] if _adds_nothing(match[2] or "", options[place]) else None


def _adds_nothing(rest: str, option: str) -> bool:
    """Whether what follows a letter is nothing, or the option's own text."""
    return _bare(rest) in ("", _bare(option))


def _bare(text: str) -> str:
    return " ".join(text.split()).strip(" .").casefold()


def _options(place: str, columns: dict[str, Any]) -> list[str]:
    """Errors: ConfigError for anything but 2 to 26 texts."""
    options = next((columns[name] for name in ("options", "choices") if columns.get(name) is not None), None)
    if isinstance(options, dict):
        options = options.get("text")
    if not isinstance(options, list) or not 2 <= len(options) <= len(ascii_uppercase):
        raise ConfigError(f"{place}: 'options' or 'choices' is {shown(options)}: give a list of 2 to 26 texts")
    if not all(isinstance(option, str) and option.strip() for option in options):
        raise ConfigError(f"{place}: an option is {shown(options)}: give texts that are not empty")
    return options


def _right_letter(place: str, columns: dict[str, Any], options: list[str]) -> str:
    """Errors: ConfigError unless the row names one of its options."""
    names = ("answer_index", "answer", "answerKey")
    name = next((name for name in names if columns.get(name) is not None), "answer")
    value = columns.get(name)
    labels = columns["choices"].get("label") if isinstance(columns.get("choices"), dict) else None
    letters = list(ascii_uppercase[: len(options)])
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
        return letters[value]
    for known in (letters, labels):
        if isinstance(known, list) and isinstance(value, str) and value in known[: len(options)]:
            return letters[known.index(value)]
    raise ConfigError(f"{place}: {name!r} is {shown(value)}: give the letter of one of its {len(options)} options")
