"""Words of a repository: the issue, as a user of the library writes it, and the README."""

import ast
import json
from collections.abc import Mapping, Sequence
from random import Random

from running import Outcome

_SHORT = 60
_OPENINGS = (
    "",
    "",
    "",
    "Hello, ",
    "Hi all, ",
    "Not sure whether this is known: ",
    "Possible bug: ",
    "While upgrading: ",
)
_CLOSINGS = (
    "",
    "",
    "",
    "The rest of `{package}` works for us.",
    "Other inputs that we tried are fine.",
    "This is with the current main of {package} on Python 3.11.",
    "It happens every time, also in a fresh interpreter.",
    "Could somebody have a look?",
    "We noticed it in a nightly job, and have no workaround.",
    "The tests of the repository all pass, so this case seems not to be covered.",
)
_GETS = ("returns", "gives", "evaluates to", "comes out as")
_WANTS = ("should be {0}", "I expected {0}", "the right answer is {0}", "it ought to be {0}", "{0} was expected")


def issue(symptom: str, examples: Sequence[tuple[str, Outcome, Outcome]], package: str, random: Random) -> str:
    """Text of an issue. ``examples``: call, outcome, expected outcome; the simplest first."""
    first, second = examples[0], random.choice(examples[1 : max(2, len(examples) // 2 + 1)])
    frame = random.choice((_session, _inline, _sections, _list))
    text = frame(symptom, first, package, random)
    if random.random() < 0.4 and len("".join((second[0], second[1].text, second[2].text))) < 2 * _SHORT:
        more = random.choice(("Likewise", "In the same way,", "Another one:", "Also:"))
        text += f"\n\n{more} `{second[0]}` {_got(second[1], random)}, not {_code(_python(second[2]))}."
    closing = random.choice(_CLOSINGS).format(package=package)
    return f"{text}\n\n{closing}" if closing else text


def _python(outcome: Outcome) -> str:
    return repr(json.loads(outcome.text)) if outcome.is_value else outcome.text


def _code(text: str) -> str:
    return f"`{text}`"


def _got(outcome: Outcome, random: Random) -> str:
    return f"{random.choice(_GETS) if outcome.is_value else 'raises'} {_code(_python(outcome))}"


def _opened(symptom: str, random: Random) -> str:
    opening = random.choice(_OPENINGS)
    lowers = opening and not symptom[:2].isupper() and not symptom.startswith(("I ", "`", "Roman"))
    return opening + (symptom[0].lower() + symptom[1:] if lowers else symptom)


def _session(symptom: str, example: tuple[str, Outcome, Outcome], package: str, random: Random) -> str:
    call, wrong, right = example
    lines = [f">>> {call}", _python(wrong)]
    if random.random() < 0.5:
        lines.insert(0, f">>> from {package} import {call.partition('(')[0]}")
    session = "\n".join(lines)
    want = random.choice(_WANTS).format(_code(_python(right)))
    return f"{_opened(symptom, random)}\n\n```\n{session}\n```\n\n{want[0].upper() + want[1:]}."


def _inline(symptom: str, example: tuple[str, Outcome, Outcome], package: str, random: Random) -> str:
    call, wrong, right = example
    want = random.choice(_WANTS).format(_code(_python(right)))
    sentence = f"{_code(call)} {_got(wrong, random)}; {want}."
    return " ".join((_opened(symptom, random), sentence) if random.random() < 0.5 else (sentence, symptom))


def _sections(symptom: str, example: tuple[str, Outcome, Outcome], package: str, random: Random) -> str:
    call, wrong, right = example
    titles = random.choice(
        (
            ("What happened", "Expected"),
            ("Actual behaviour", "Expected behaviour"),
            ("Steps and result", "What I wanted"),
        )
    )
    got = f"{_code(call)} {_got(wrong, random)}."
    return f"# {symptom.rstrip('.')}\n\n## {titles[0]}\n\n{got}\n\n## {titles[1]}\n\n{_code(_python(right))}"


def _list(symptom: str, example: tuple[str, Outcome, Outcome], package: str, random: Random) -> str:
    call, wrong, right = example
    words = random.choice((("call", "got", "want"), ("input", "result", "expected"), ("I ran", "I see", "I need")))
    values = (call, _python(wrong), _python(right))
    lines = "\n".join(f"- {word}: {_code(value)}" for word, value in zip(words, values, strict=True))
    return f"{_opened(symptom, random)}\n\n{lines}"


def readme(package: str, about: str, sources: Mapping[str, str], exported: Sequence[str], random: Random) -> str:
    """Text of README.md: what the library is, and one line for each function that it offers."""
    lines = []
    for source in sources.values():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in exported:
                sentence = (ast.get_docstring(node) or "").splitlines()[0].rstrip(".")
                lines.append(f"* `{node.name}({', '.join(each.arg for each in node.args.args)})`: {sentence}")
    title = random.choice(("Functions", "What it offers", "Use", "Overview"))
    tests = random.choice(("Tests: `python -m unittest`.", "Run `python -m unittest` for the tests.", ""))
    return (
        "\n".join([f"# {package}", "", f"{about}.", "", f"## {title}", "", *lines, *(["", tests] if tests else [])])
        + "\n"
    )
