"""Message to a program, and its outcome from untrusted bytes, wherever it ran."""

import json
from dataclasses import dataclass
from typing import Any

from titan_rl.environments.sandbox.program import CallResult, Ending, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.values import decode, encode

BEGUN = b"begun\n"
"""Mark written before a program's first line is run."""


@dataclass(frozen=True)
class ExitReport:
    """Exit of a program, as its watcher saw it."""

    why: Ending | None
    """The exceeded limit; None: it ended by itself."""
    exit_code: int
    seconds: float
    memory: int
    """Bytes."""


def as_task(program: Program) -> dict[str, Any]:
    """Message to the program: source, standard input and calls, as plain values for JSON."""
    calls = [[call.function, [encode(argument) for argument in call.arguments]] for call in program.calls]
    return dict(source=program.source, stdin=program.stdin, calls=calls)


def outcome_of(program: Program, ended: ExitReport, reply: bytes, stdout: bytes, stderr: bytes) -> Outcome:
    """Outcome of a program. ``reply``: bytes of its call socket. Errors: SandboxFailed if it did not begin."""
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
    """Call results; None for anything that main_module.py does not write."""
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
