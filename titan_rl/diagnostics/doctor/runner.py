"""Runner of all checks: first those without actors, then the actors are started once."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.controller.preflight.checks import Checked
from titan_rl.diagnostics.doctor.actors_under_test import Patient
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.context import Visit
from titan_rl.diagnostics.doctor.findings import Check, Finding, NotLookedAt, Wrong
from titan_rl.mesh.meshes import ALL_PARTS

Tell = Callable[[Finding], None]


async def examine(checked: Checked, folder: Path, tell: Tell, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """A finding a check, told as it is made. ``folder``: empty, of the doctor's own."""
    visit = Visit(checked, folder)
    findings = await look_over(visit, [check for check in checks if not check.needs], tell)
    rest = [check for check in checks if check.needs]
    if not rest:
        return findings
    try:
        async with Patient(checked, folder) as patient:
            visit.started = patient
            findings += await look_over(visit, rest, tell, findings)
    except Exception as error:  # whatever kept the actors from starting is what is wrong
        if visit.started is not None:
            raise
        findings += _told([Finding(rest[0], "wrong", "the actors do not start", one_line(error))], tell)
        findings += _told([Finding(each, "not looked at", "the actors did not start") for each in rest[1:]], tell)
    return findings


def _told(findings: list[Finding], tell: Tell) -> list[Finding]:
    for finding in findings:
        tell(finding)
    return findings


async def look_over(visit: Visit, checks: Sequence[Check], tell: Tell, before: Sequence[Finding] = ()) -> list[Finding]:
    """``before``: what is known already."""
    failed = {finding.check.name for finding in before if finding.status == "wrong"}
    findings = []
    for check in checks:
        finding = await _look(visit, check, failed)
        failed |= {check.name} if finding.status == "wrong" else set()
        findings += _told([finding], tell)
    return findings


async def _look(visit: Visit, check: Check, failed: set[str]) -> Finding:
    parts = ALL_PARTS if visit.started is None else visit.started.parts
    if lacking := sorted(check.needs - parts):
        return Finding(check, "not looked at", f"the run has no {lacking[0]}")
    if first := next((name for name in check.after if name in failed), None):
        return Finding(check, "not looked at", f"what is wrong with {first} would show here, too")
    start = time.perf_counter()
    mend = ""
    try:
        status, says, evidence = "passed", await check.look(visit), ""
    except NotLookedAt as why:
        status, says, evidence = "not looked at", str(why), ""
    except Wrong as wrong:
        status, says, evidence, mend = "wrong", wrong.says, wrong.evidence, wrong.mend
    except Exception as error:  # a check that cannot be made has found something, whatever it is
        status, says, evidence = "wrong", "it could not be looked at", one_line(error)
    return Finding(check, status, says, evidence, time.perf_counter() - start, mend)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}" + (f" {lines[-1]}" if len(lines) > 1 else "")
