"""Constitution: principles by which answers are criticized, revised and compared, in a TOML of the user's words.

    [[principles]]
    name = "harmless"
    critique = "Say in which ways your last answer could harm somebody."
    revision = "Rewrite your last answer so that it harms nobody."
    comparison = "Which of the two answers is less harmful?"

Bai et al., "Constitutional AI: Harmlessness from AI Feedback" (2022), sections 3.1 and 4.1.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import exists, getsize, isfile  # exists and isfile say no to a name that is too long
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from titan_rl.config.io.printable import printable
from titan_rl.config.load import ConfigError, build_section, read_toml
from titan_rl.data.seeds import named_seed
from titan_rl.diagnostics.recipes.recipe import FOLDER

Text = Annotated[str, Field(max_length=4000, pattern=r"^[\n\t\P{Cc}]*[^\s\p{Cc}][\n\t\P{Cc}]*$")]


@dataclass(kw_only=True)
class Principle:
    """Principle in words for the model and for the judge."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=40, pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$")]
    critique: Text | None = None
    """Request to criticize the last answer."""
    revision: Text | None = None
    """Request to write the answer anew, by the critique."""
    comparison: Text | None = None
    """Question which of two answers is better."""


@dataclass(kw_only=True)
class Constitution:
    """Contents of the file."""

    principles: Annotated[list[Principle], Field(min_length=1, max_length=100)]

    @property
    def of_revisions(self) -> list[Principle]:
        return [each for each in self.principles if each.revision]

    @property
    def of_comparisons(self) -> list[Principle]:
        return [each for each in self.principles if each.comparison]


def find_constitution(file: Path) -> Path:
    """TOML of a path, or of a recipe's name."""
    shipped = FOLDER / file.name / "constitution.toml"
    return shipped if len(file.parts) == 1 and not exists(file) and isfile(shipped) else file


def read_constitution(file: Path) -> Constitution:
    """Constitution of a TOML, or of a recipe's name. Errors: ConfigError, one line with the file and the key."""
    path = find_constitution(file)
    if not isfile(path) or not getsize(path):
        raise ConfigError(f"{path} is empty or no file: give a TOML of [[principles]], or the recipe constitutional")
    tables = read_toml(path)
    try:
        return constitution_of(tables)
    except ConfigError as error:
        raise ConfigError(printable(f"{path}: {error}")) from None


def constitution_of(tables: dict[str, Any]) -> Constitution:
    """Constitution by the tables of a TOML. Errors: ConfigError."""
    try:
        json.dumps(tables, default=str)
    except (RecursionError, ValueError):
        raise ConfigError("it nests too deeply: a constitution is a list of [[principles]]") from None
    if not isinstance(tables.get("principles", []), list):
        raise ConfigError("principles is one table: write each principle below a line [[principles]]")
    constitution = build_section(Constitution, tables, "constitution")
    names = [principle.name.casefold() for principle in constitution.principles]
    for number, principle in enumerate(constitution.principles):
        if names[number] in names[:number]:
            raise ConfigError(f"two principles have the name {principle.name!r}: give one of them another")
        _check(principle)
    return constitution


def _check(principle: Principle) -> None:
    """Errors: ConfigError for a principle without a use."""
    if (principle.critique is None) != (principle.revision is None):
        missing = "critique" if principle.critique is None else "revision"
        raise ConfigError(f"principle {principle.name!r} has no {missing}: critique and revision go together")
    if principle.critique is None and principle.comparison is None:
        raise ConfigError(f"principle {principle.name!r} asks nothing: give critique and revision, or comparison")


def drawn(principles: Sequence[Principle], *names: object) -> Principle:
    """Principle that a named seed draws; each is as likely."""
    return principles[named_seed("principle", *names) % len(principles)]
