"""Final answer of a worked one, and whether it is the expected one.

What is in the last ``\\boxed{}`` is final, else the last line, or what that says "the answer is".
"""

import re

from titan_rl.environments.rewards.mathematics.equality import expected_of, is_equal

_HASHES = "####"
"""Before an answer of GSM8K."""
_LONGEST = 300
"""Characters of a final answer; a longer one is wrong."""
_SAID = re.compile(r".*\b(?:answer|result)\b\s*(?:is|:|=)\s*:?\s*(.*)", re.IGNORECASE | re.DOTALL)
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?=[-+.]?[0-9]|\\[A-Za-z]|[A-Z](?![A-Za-z])|[a-z](?=\$|\\)))")
_BOX_AT = re.compile(rf"\s*{_BOX.pattern}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX_END = re.compile(r"\$|\\[)\]]|\n")
"""Of a box without braces."""
_HOPE = "I hope it is correct."
"""Behind a final answer in the prompts of Minerva."""


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer's final answer equals the expected one. Errors: ValueError if the latter is unreadable."""
    reference = _in_a_box(expected)
    expected_of(reference)
    final = final_answer(answer)
    return final is not None and len(final) <= _LONGEST and is_equal(final, reference)


def can_be_read(expected: str) -> bool:
    """Whether an expected answer can be read as mathematics."""
    try:
        expected_of(_in_a_box(expected))
    except ValueError:
        return False
    return True


def _in_a_box(expected: str) -> str:
    r"""What is in its box if it is a whole solution; ``\\frac`` of a file that was escaped twice is ``\frac``."""
    inside = (final_answer(expected) if _BOX.search(expected) else None) or expected
    return inside if "\\begin" in inside else _ESCAPED_TWICE.sub(r"\\", inside)


def final_answer(answer: str) -> str | None:
    r"""Content of the last ``\boxed{}`` or ``\boxed 5``, else the last line, without "answer is" or ``####``."""
    if (box := _last_box(answer)) is not None:
        return box or None
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    last = _without_stars(lines[-1]).removesuffix(_HOPE).removeprefix(_HASHES).strip()
    match = _SAID.fullmatch(last)
    return _without_stars((match[1] if match else last).strip().rstrip(".")).rstrip(".").strip() or None


def _last_box(answer: str) -> str | None:
    """Content of the last box that is in no other, empty for one that is not closed; None without a box."""
    ends, last, end = _ends_of_braces(answer), None, 0
    for box in _BOX.finditer(answer):
        if box.start() >= end:
            last = box
            end = ends.get(box.end() - 1, 0) if box["brace"] else 0
    if last is None:
        return None
    if not last["brace"]:
        return _bare(answer[last.end() :])
    return _inside(answer, last.end(), end, ends) if end else ""


def _bare(text: str) -> str:
    """What a box without braces holds, from its beginning."""
    return _BOX_END.split(text, maxsplit=1)[0].strip().rstrip(".")


def _inside(answer: str, start: int, end: int, ends: dict[int, int]) -> str:
    """What is in braces, or in the box that is all that is in them."""
    while box := _BOX_AT.match(answer, start, end):
        if not box["brace"]:
            return _bare(answer[box.end() : end])
        inner_end = ends[box.end() - 1]
        if answer[inner_end + 1 : end].strip():
            break
        start, end = box.end(), inner_end
    return answer[start:end].strip()


def _ends_of_braces(text: str) -> dict[int, int]:
    r"""Positions of closing braces by those of the opening ones; ``\{`` and ``\}`` are signs."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            ends[opened.pop()] = brace.start()
    return ends


def _without_stars(line: str) -> str:
    """Without the signs of bold print around it."""
    line = line.strip()
    return line[2:-2].strip() if len(line) > 4 and line.startswith("**") and line.endswith("**") else line
