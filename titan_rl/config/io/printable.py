"""Text that a model wrote, or that anybody else did, as a terminal or a log may show it."""

from typing import TextIO


def printable(text: str, most: int | None = None) -> str:
    """Line ends and whatever a terminal would obey as they are seen in code; ``most``: characters, then it is cut."""
    text = text if most is None else text[: most + 1]
    shown = text if text.isprintable() else "".join(s if s.isprintable() else repr(s)[1:-1] for s in text)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."


def printable_lines(text: str) -> str:
    """The same of each line, which ends as it did."""
    return "\n".join(map(printable, text.split("\n")))


def whole_characters(text: str) -> str:
    """Text that UTF-8 can hold: half a character becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def say(text: object, file: TextIO | None = None) -> None:
    """``print`` for text that holds what a run directory, a server, a data file or a model says; it is flushed."""
    print(printable_lines(str(text)), file=file, flush=True)
