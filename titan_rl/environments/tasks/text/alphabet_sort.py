"""Names in alphabetical order: a list that grows turn by turn is sorted anew each time, with new names marked.

    compact   sort Ben Ada>   Ada Ben   add Cal>   Ada Ben Cal*   ...
    chat      Sort these names by last name: ...   <sorted>...</sorted>   Now add these: ...   <sorted>...</sorted>

In a chat a name is a first and a last name in one word (``AdaFinlay``), and the prompt says by which of the two it is
sorted. From the second turn on, names of that turn are marked, in a chat by `` // new``. The reward is the mean
similarity of all turns' lists to the expected ones, to a power, which makes small mistakes costly. Names are those of
reasoning-gym's list.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field

from titan_rl.compat.reasoning_gym import part
from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task
from titan_rl.environments.tasks.text.reverse_text import similarity

_SORTED = re.compile(r"<sorted>(.*?)</sorted>", re.DOTALL)
_NAME = re.compile(r"[A-Z][a-z]{2,7}")
_FIRST_ASKED = (
    "Sort these names in alphabetical order by {by} name: {names}\n\nGive the list within <sorted> tags, one name a "
    "line, each written as it is here."
)
_THEN_ASKED = (
    "Now add these names, and sort all names so far in alphabetical order by {by} name: {names}\n\nGive the list "
    "within <sorted> tags as before, and write ` // new` behind each name that is new in this turn."
)


@cache
def plain_names() -> tuple[str, ...]:
    """Names of three to eight letters."""
    return tuple(sorted({name for name in part("cognition.needle_data").NAMES if _NAME.fullmatch(name)}))


@dataclass(kw_only=True)
class AlphabetSortOptions:
    """``[task.options]`` of names in order."""

    turns: Annotated[int, Field(ge=1, le=10)] = 3
    """Lists of an episode."""
    min_names: Annotated[int, Field(ge=1, le=20)] = 1
    """Fewest new names of a turn."""
    max_names: Annotated[int, Field(ge=1, le=20)] = 4
    """Most new names of a turn."""
    has_last_names: bool = True
    """Whether a name in a chat is a first and a last one, by either of which lists are sorted; else a first name."""
    power: Annotated[float, Field(ge=1, le=32)] = 4.0
    """To which the mean similarity is raised."""


class AlphabetSortTask(Task):
    """Endless task of names; one prompt in five is held out, by a hash of its names. Errors: ConfigError."""

    ABOUT = "names in alphabetical order, turn by turn: task.options.turns, min_names, max_names, ..."
    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(AlphabetSortOptions, task.options, "task.options")
        if self.options.min_names > self.options.max_names:
            raise ConfigError(
                f"task.options.min_names = {self.options.min_names} is more than max_names = "
                f"{self.options.max_names}: lower it"
            )

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        draw, options = random.Random(f"{stream} {seed} {index}"), self.options
        counts = [draw.randint(options.min_names, options.max_names) for _ in range(options.turns)]
        first, last = draw.sample(plain_names(), sum(counts)), draw.sample(plain_names(), sum(counts))
        has_last = self.style == "chat" and options.has_last_names
        pairs = [[own, family] if has_last else [own] for own, family in zip(first, last, strict=True)]
        by = draw.choice((0, 1)) if has_last else 0
        starts = [sum(counts[:turn]) for turn in range(options.turns)]
        names = [pairs[start : start + count] for start, count in zip(starts, counts, strict=True)]
        entry = {"names": names, "by": by}
        text = " | ".join(" ".join(map("".join, turn)) for turn in names)
        return Prompt(f"{stream}/{index:07d}", text, self._written(entry, options.turns - 1), entry)

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.text)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        asked = self._asked(prompt.entry, 0)
        if self.style == "compact":
            return asked
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", asked)]

    def _asked(self, entry: dict[str, Any], turn: int) -> str:
        names = ["".join(name) for name in entry["names"][turn]]
        if self.style == "compact":
            return f"{'add' if turn else 'sort'} {' '.join(names)}>"
        asked, by = _THEN_ASKED if turn else _FIRST_ASKED, ("FIRST", "LAST")[entry["by"]]
        return asked.format(by=by, names=", ".join(names))

    def _written(self, entry: dict[str, Any], turn: int) -> str:
        """Expected list of a turn, without tags."""
        known = [name for earlier in entry["names"][: turn + 1] for name in earlier]
        new = entry["names"][turn] if turn else []
        mark, between = ("*", " ") if self.style == "compact" else (" // new", "\n")
        ordered = sorted(known, key=lambda name: (name[entry["by"]], name))
        return between.join("".join(name) + (mark if name in new else "") for name in ordered)

    def demonstration(self, prompt: Prompt) -> list[str]:
        written = [self._written(prompt.entry, turn) for turn in range(self.options.turns)]
        return written if self.style == "compact" else [f"<sorted>\n{text}\n</sorted>" for text in written]

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        if len(answers) >= self.options.turns:
            return None
        asked = self._asked(prompt.entry, len(answers))
        return f"\n{asked}" if self.style == "compact" else asked

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score of all turns; one that was not reached counts as an empty list."""
        expected = [self._written(prompt.entry, turn) for turn in range(self.options.turns)]
        alike = [similarity(self._read(answer), text) for answer, text in zip(answers, expected, strict=False)]
        return {"order": (sum(alike) / len(expected)) ** self.options.power}

    def _read(self, answer: str) -> str:
        """List of an answer, a name a line without spaces at its ends; empty without one, or with several."""
        if self.style == "compact":
            return answer.strip()
        return "\n".join(_lines(_SORTED.findall(answer)))


def _lines(tagged: Sequence[str]) -> list[str]:
    return [line.strip() for line in tagged[0].splitlines() if line.strip()] if len(tagged) == 1 else []
