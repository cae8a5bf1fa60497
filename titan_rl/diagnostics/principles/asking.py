"""Questions to a model or a judge, and their replies, each on disk before it counts.

    question ──▶ recorded under its name? ──yes──▶ that reply
                         └──no──▶ generators, or the judge's server ──▶ journal (fsync) ──▶ the reply

So a command that was killed goes the same way again, and asks nothing twice.
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titan_rl.config.io.printable import whole_characters
from titan_rl.data.rows.row_messages import Schema
from titan_rl.data.text.messages import Message, message
from titan_rl.records.preferences.journal import EntryJournal

MOST_TEXT = 200_000
"""Characters of a reply that are kept; one that is longer is ``cut``."""
Status = Literal["ok", "cut", "too_long", "refused"]
"""How a reply ended: by itself, at its longest, or not at all: there is no room for one, or the server refuses."""
_STATUSES = ("ok", "cut", "too_long", "refused")
_NAME = re.compile(r"[a-z]{1,20}/[0-9]{4,9}(/[a-z]{1,20}|/[0-9]{1,4}){1,3}")


@dataclass(frozen=True)
class Question:
    """Conversation that is to be gone on with."""

    name: str
    """Its place among all questions, such as ``prompt/000007/critique/0``."""
    messages: Sequence[Message]
    temperature: float = 0.0
    tools: Sequence[Schema] = ()
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Reply to a question."""

    text: str
    status: Status = "ok"

    @property
    def is_whole(self) -> bool:
        """Whether it ended by itself and says something."""
        return self.status == "ok" and bool(self.text.strip())


Ask = Callable[[Question], Coroutine[Any, Any, Reply]]


@dataclass(frozen=True)
class Exchange:
    """Reply as the journal keeps it."""

    id: str
    """Name of its question."""
    text: str
    status: Status

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def exchange_of(fields: Any) -> Exchange:
    """Exchange by its fields, which anybody may have written. Errors: ValueError."""
    if not isinstance(fields, dict) or set(fields) != {"id", "text", "status"}:
        raise ValueError("it is an object with id, text and status")
    name, text, status = fields["id"], fields["text"], fields["status"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"id must be of the form {_NAME.pattern}")
    if not isinstance(text, str) or len(text) > MOST_TEXT or text != whole_characters(text):
        raise ValueError(f"text must be UTF-8 of at most {MOST_TEXT:,} characters")
    if not isinstance(status, str) or status not in _STATUSES:
        raise ValueError(f"status must be one of {', '.join(_STATUSES)}")
    return Exchange(name, text, status)


class Recorded:
    """Questions whose replies are recorded; the only owner of their journal."""

    def __init__(self, path: Path) -> None:
        """Errors: ConfigError for a damaged journal; OSError."""
        self._journal = EntryJournal(path, exchange_of, "exchange")
        self._replies = {each.id: Reply(each.text, each.status) for each in self._journal.entries}

    def asking(self, ask: Ask) -> Ask:
        """``ask``, for what is not on record."""

        async def ask_once(question: Question) -> Reply:
            if question.name not in self._replies:
                self._record(question.name, await ask(question))
            return self._replies[question.name]

        return ask_once

    def _record(self, name: str, reply: Reply) -> None:
        """Errors: DiskFull; ConfigError if something else wrote to the journal."""
        text = whole_characters(reply.text)
        kept = Reply(text, reply.status) if len(text) <= MOST_TEXT else Reply(text[-MOST_TEXT:], "cut")
        self._journal.append(Exchange(name, kept.text, kept.status))
        self._replies[name] = kept

    def close(self) -> None:
        self._journal.close()


def asked(name: str, text: str) -> Question:
    """Question of one message, answered greedily."""
    return Question(name, [message("user", text)])
