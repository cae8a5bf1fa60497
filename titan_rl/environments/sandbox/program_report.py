"""What a program is told, and what it said: bytes from an enemy become its outcome, wherever it ran."""

import json
from dataclasses import dataclass
from typing import Any

from titan_rl.environments.sandbox.program import Ending, Given, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.values import decode, encode

BEGUN = b"begun\n"
"""What is said for a program before its first line is run."""


@dataclass(frozen=True)
class Ended:
    """How it did, as those say who watched it."""

    why: Ending | None
    """What it had too much of; None: it ended by itself."""
    exit_code: int
    seconds: float
    memory: int
    """Bytes."""


def as_task(program: Program) -> dict[str, Any]:
    """All that goes in, as JSON takes it."""
    calls = [[call.function, [encode(argument) for argument in call.arguments]] for call in program.calls]
    return dict(source=program.source, stdin=program.stdin, calls=calls)


def outcome_of(program: Program, ended: Ended, said: bytes, stdout: bytes, stderr: bytes) -> Outcome:
    """``said``: on the socket for what its functions give. Errors: SandboxFailed for a program that did not begin."""
    begun, given, most = said[: len(BEGUN)], said[len(BEGUN) :], program.limits.output
    if begun != BEGUN:  # whatever it ended by, that was not the program's doing
        raise SandboxFailed(f"a program did not begin: {stderr[:300].decode(errors='replace')}")
    ending = ended.why or ("error" if ended.exit_code else "ok")
    is_over = max(len(stdout), len(stderr), len(given)) > most
    ending = "output" if is_over and ending in ("ok", "error") else ending
    return Outcome(
        ending=ending,
        exit_code=ended.exit_code,
        stdout=stdout[:most].decode(errors="replace"),
        stderr=stderr[:most].decode(errors="replace"),
        given=_given(given, len(program.calls)) if ending == "ok" else None,
        seconds=ended.seconds,
        memory=ended.memory,
    )


def _given(said: bytes, count: int) -> tuple[Given, ...] | None:
    """Whatever is not what our own code writes counts as nothing."""
    if not count:
        return ()
    try:
        results = [(kind, inner) for kind, inner in json.loads(said)]
        given = tuple(Given(decode(inner)) if kind == "value" else Given(error=str(inner)) for kind, inner in results)
    except (ValueError, TypeError, RecursionError):
        return None
    return given if len(given) == count else None
