"""What a program is told, and what it said: bytes from an enemy become its outcome, wherever it ran."""

import json
from dataclasses import dataclass
from typing import Any

from titan_rl.environments.sandbox.program import CallResult, Ending, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.values import decode, encode

BEGUN = b"begun\n"
"""What is said for a program before its first line is run."""


@dataclass(frozen=True)
class ExitReport:
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


def outcome_of(program: Program, ended: ExitReport, reply: bytes, stdout: bytes, stderr: bytes) -> Outcome:
    """``said``: on the socket for what its functions give. Errors: SandboxFailed for a program that did not begin."""
    begun, results, most = reply[: len(BEGUN)], reply[len(BEGUN) :], program.limits.output
    if begun != BEGUN:  # whatever it ended by, that was not the program's doing
        raise SandboxFailed(f"a program did not begin: {stderr[:300].decode(errors='replace')}")
    ending = ended.why or ("error" if ended.exit_code else "ok")
    is_over = max(len(stdout), len(stderr), len(results)) > most
    ending = "output" if is_over and ending in ("ok", "error") else ending
    return Outcome(
        ending=ending,
        exit_code=ended.exit_code,
        stdout=stdout[:most].decode(errors="replace"),
        stderr=stderr[:most].decode(errors="replace"),
        results=_call_results(results, len(program.calls)) if ending == "ok" else None,
        seconds=ended.seconds,
        memory=ended.memory,
    )


def _call_results(reply: bytes, count: int) -> tuple[CallResult, ...] | None:
    """Whatever is not what our own code writes counts as nothing."""
    if not count:
        return ()
    try:
        results = [(kind, inner) for kind, inner in json.loads(reply)]
        call_results = tuple(
            CallResult(decode(inner)) if kind == "value" else CallResult(error=str(inner)) for kind, inner in results
        )
    except (ValueError, TypeError, RecursionError):
        return None
    return call_results if len(call_results) == count else None
