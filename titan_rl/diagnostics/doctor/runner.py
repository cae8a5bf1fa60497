"""Runner of all checks: first those without actors, then the actors are started once."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.controller.preflight.checks import Checked
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.findings import Check, CheckFailed, CheckSkipped, Finding
from titan_rl.mesh.meshes import ALL_PARTS

OnFinding = Callable[[Finding], None]


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
        findings += _report([Finding(rest[0], "wrong", "the actors do not start", one_line(error))], on_finding)
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
    findings = []
    for check in checks:
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
    except Exception as error:  # a check that cannot be made has found something, whatever it is
        status, message, evidence = "wrong", "it could not be looked at", one_line(error)
    return Finding(check, status, message, evidence, time.perf_counter() - start, mend)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}" + (f" {lines[-1]}" if len(lines) > 1 else "")
