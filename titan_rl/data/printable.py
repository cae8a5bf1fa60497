"""Text that a model wrote, or that anybody else did, as a terminal or a log may show it."""


def printable(text: str, most: int | None = None) -> str:
    """Line ends and whatever a terminal would obey as they are seen in code; ``most``: characters, then it is cut."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 3]}..."
