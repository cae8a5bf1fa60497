"""Final answer of a worked one, and whether it is the expected one.

What is in the last ``\\boxed{}`` is final, else the last line, or what that says "the answer is".
"""

import re

from titan_rl.environments.rewards.mathematics.equality import expected_of, is_equal
from titan_rl.environments.rewards.mathematics.notation import closing_brace

_HASHES = "####"
"""Before an answer of GSM8K."""
_LONGEST = 300
"""Characters of a final answer; a longer one is wrong."""
_SAID = re.compile(r".*\b(?:answer|result)\b\s*(?:is|:|=)\s*:?\s*(.*)", re.IGNORECASE | re.DOTALL)
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")
_BOX = re.compile(r"\\boxed\s*\{")


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
    """Content of the last ``\\boxed{}``, else the last line, without an "answer is" or ``####`` before it."""
    if boxes := list(_BOX.finditer(answer)):
        start = boxes[-1].end()
        end = closing_brace(answer, start)
        return None if end is None else answer[start:end].strip() or None
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    last = _without_stars(lines[-1]).removeprefix(_HASHES).strip()
    match = _SAID.fullmatch(last)
    return _without_stars((match[1] if match else last).strip().rstrip(".")).rstrip(".").strip() or None


def _without_stars(line: str) -> str:
    """Without the signs of bold print around it."""
    line = line.strip()
    return line[2:-2].strip() if len(line) > 4 and line.startswith("**") and line.endswith("**") else line
