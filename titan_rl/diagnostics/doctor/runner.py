"""Runner of all checks: first those without actors, then the actors are started once."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.controller.preflight.checks import Checked
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.findings import Check, Finding
from titan_rl.mesh.meshes import ALL_PARTS
from titan_rl.mesh.processes.deadlines import DeadlineError
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorFault, ActorProcess

OnFinding = Callable[[Finding], None]
_MEND_START = "Mend what it says: the run would not start either"
_PARTS = {"generator": "generators", "verifier": "verifiers", "scorer": "verifiers"}
"""Kinds of processes to the parts of the mesh that they are."""


async def run_doctor(
    checked: Checked, folder: Path, on_finding: OnFinding, checks: Sequence[Check] = CHECKS
) -> list[Finding]:
    """Findings of all checks, each handed to ``on_finding`` at once. ``folder``: empty, of the doctor's own."""
    context = CheckContext(checked, folder)
    findings = await run_checks(context, [check for check in checks if not check.needs], on_finding)
    rest = [check for check in checks if check.needs]
    if not rest:
        return findings
    try:
        async with ActorsUnderTest(checked, folder) as actors:
            context.started = actors
            findings += await run_checks(context, rest, on_finding, findings)
    except Exception as error:  # whatever kept the actors from starting is what is wrong
        if context.started is not None:
            raise
        first = Finding(rest[0], "wrong", "the actors do not start", one_line(error), own_mend=_MEND_START)
        findings += _report([first], on_finding)
        findings += _report(
            [Finding(each, "not looked at", "the actors did not start") for each in rest[1:]], on_finding
        )
    return findings


def _report(findings: list[Finding], on_finding: OnFinding) -> list[Finding]:
    for finding in findings:
        on_finding(finding)
    return findings


async def run_checks(
    context: CheckContext, checks: Sequence[Check], on_finding: OnFinding, before: Sequence[Finding] = ()
) -> list[Finding]:
    """Findings of these checks. ``before``: earlier findings."""
    failed = {finding.check.name for finding in before if finding.status == "wrong"}
    findings: list[Finding] = []
    for check in checks:
        if (lost := next((context.lost[part] for part in sorted(check.needs & context.lost.keys())), None)) is not None:
            finding = Finding(check, "not looked at", lost)
        else:
            finding = await _run_check(context, check, failed)
        failed |= {check.name} if finding.status == "wrong" else set()
        findings += _report([finding], on_finding)
    return findings


async def _run_check(context: CheckContext, check: Check, failed: set[str]) -> Finding:
    parts = ALL_PARTS if context.started is None else context.started.parts
    if lacking := sorted(check.needs - parts):
        return Finding(check, "not looked at", f"the run has no {lacking[0]}")
    if first := next((name for name in check.after if name in failed), None):
        return Finding(check, "not looked at", f"what is wrong with {first} would show here, too")
    start = time.perf_counter()
    mend = ""
    try:
        status, message, evidence = "passed", await check.run(context), ""
    except CheckSkipped as why:
        status, message, evidence = "not looked at", str(why), ""
    except CheckFailed as wrong:
        status, message, evidence, mend = "wrong", wrong.message, wrong.evidence, wrong.mend
    except (ActorFault, ActorDied) as error:  # whatever is looked at, it is no finding about that
        ended = ended_actors(error)
        context.lost |= {part: f"{who} ended in the check {check.name}" for part, who in _lost(check, ended).items()}
        status, message, evidence = "not finished", "an actor ended meanwhile", _endings(ended) or one_line(error)
    except DeadlineError as error:
        status, message, evidence = "not finished", "an actor was too slow", one_line(error)
    except Exception as error:  # a check that cannot be made has found something, whatever it is
        status, message, evidence = "wrong", "it could not be looked at", one_line(error)
    return Finding(check, status, message, evidence, time.perf_counter() - start, mend)


def ended_actors(error: BaseException | None) -> list[ActorProcess]:
    """Processes whose end an error, or a cause of it, tells of."""
    while error is not None and not isinstance(error, ActorDied):
        error = error.__cause__
    return [] if error is None else error.processes


def _lost(check: Check, ended: Sequence[ActorProcess]) -> dict[str, str]:
    """Parts of the mesh that are not complete without these, each with whom; all that the check needs if it is not
    known who ended. What is no part is called by the trainer."""
    return {_PARTS.get(each.kind, "trainer"): each.name for each in ended} or dict.fromkeys(check.needs, "an actor")


def _endings(processes: Sequence[ActorProcess]) -> str:
    return ", ".join(f"{each.name} {each.how_it_ended}" for each in processes)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}" + (f" {lines[-1]}" if len(lines) > 1 else "")
