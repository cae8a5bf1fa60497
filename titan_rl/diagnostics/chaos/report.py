"""The result of an experiment: figures, verdict, and text for people. Pure."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from titan_rl.diagnostics.chaos.injection import Injection
from titan_rl.diagnostics.chaos.outcomes import Outcome
from titan_rl.diagnostics.chaos.schedule import KINDS, STATES, WAYS


def row(one: Injection, outcome: Outcome) -> dict[str, Any]:
    """Fault as JSON."""
    return {
        "target": one.target.name,
        "pid": one.target.pid,
        "kind": one.kind,
        "state": one.state,
        "way": one.way,
        "step": one.step,
        "scheduled": {"after_step": one.fault.after_step, "state": one.fault.state, "way": one.fault.way},
        "witness": f"{one.witness.before} -> {one.witness.after}",
        "witnessed": one.is_witnessed,
        "time": one.witness.happened,
        "noticed_after": outcome.noticed_after,
        "repaired_after": outcome.repaired_after,
        "steps_redone": outcome.steps_redone,
        "why": outcome.why,
        "repaired_by": outcome.repaired_by,
    }


def line(row: dict[str, Any]) -> str:
    """Fault as a line of text."""
    redone, step = row["steps_redone"], "start" if row["step"] < 0 else f"step {row['step']}"
    return (
        f"{step:<9}  {row['target']:<16} {row['state']:<14} {row['way']:<5} "
        f"noticed after {_seconds(row['noticed_after'])}, repaired after {_seconds(row['repaired_after'])}"
        + (f", {redone} steps redone" if redone else "")
        + (" by a resume" if row["repaired_by"] == "resume" and row["kind"] != "controller" else "")
        + ("" if row["witnessed"] else f"  NOT WITNESSED ({row['witness']})")
    )


def _seconds(value: float | None) -> str:
    return "   ?    " if value is None else f"{value:6.3f} s"


def tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of faults by kind, state and way, and the medians of each kind."""
    witnessed = [row for row in rows if row["witnessed"]]
    states = Counter((row["kind"], row["state"]) for row in witnessed)
    ways = Counter((row["kind"], row["way"]) for row in witnessed)
    return {
        "by_state": {kind: {state: states[kind, state] for state in _states(kind)} for kind in KINDS},
        "by_way": {kind: {way: ways[kind, way] for way in WAYS[kind]} for kind in KINDS},
        "by_kind": {kind: _figures([row for row in witnessed if row["kind"] == kind]) for kind in KINDS},
    }


def _states(kind: str) -> tuple[str, ...]:
    return (*STATES[kind], *({"starting"} - set(STATES[kind])))


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    noticed = [row["noticed_after"] for row in rows]
    unstopped = [row["noticed_after"] for row in rows if row["way"] != "stop"]
    return {
        "faults": len(rows),
        "noticed_after_median": _of(statistics.median, noticed),
        "noticed_after_median_unless_stopped": _of(statistics.median, unstopped),
        "noticed_after_max": _of(max, noticed),
        "repaired_after_median": _of(statistics.median, [row["repaired_after"] for row in rows]),
        "repaired_after_max": _of(max, [row["repaired_after"] for row in rows]),
        "steps_redone_median": _of(statistics.median, [row["steps_redone"] for row in rows]),
        "steps_redone_max": _of(max, [row["steps_redone"] for row in rows]),
    }


def _of(statistic: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(statistic(numbers), 4) if numbers else None


def redone_losses(events: list[dict[str, Any]]) -> dict[str, int]:
    """Steps that were trained again from their records after a resume, and how many of them had another loss."""
    redone = [event for event in events if event["kind"] == "redone"]
    return {"redone": len(redone), "redone_differently": sum(not event["same"] for event in redone)}


def flaws(report: dict[str, Any]) -> list[str]:
    """Why the verdict is negative; empty if it is positive."""
    samples, witnessed = report["samples"], report["faults_witnessed"]
    settled = samples["trained"] + samples["discarded"] + samples["pending"]
    wrong = {
        "the time limit was reached": report["timed_out"],
        f"exit code {report['exit_code']}: {report['why_ended']}": report["exit_code"] != 0,
        f"{report['steps_done']} of {report['steps_asked']} steps": report["steps_done"] != report["steps_asked"],
        f"{witnessed} of {report['faults_asked']} faults happened": witnessed != report["faults_asked"],
        f"processes were left behind: {report['processes_left']}": report["processes_left"],
        "processes outlived their killed controller": report["orphans_left"],
        f"{samples['issued']} samples were issued, {settled} are accounted for": samples["issued"] != settled,
        f"{samples['pending']} samples are pending": samples["pending"] and not report["samples_may_be_pending"],
        f"the ledger has {samples['ledger_flaws']} flaws": samples["ledger_flaws"],
        f"{samples['prompts_lost']} prompts were lost": samples["prompts_lost"],
        f"{samples['trained_twice']} samples were trained twice": samples["trained_twice"],
        f"{samples['steps_without_record']} steps have no record": samples["steps_without_record"],
        "ledger and records differ": samples["trained_but_not_recorded"] or samples["recorded_at_another_step"],
        f"{report['redone_differently']} redone steps had another loss": report["redone_differently"],
        "the undisturbed run trained other prompts": not report.get("undisturbed", {}).get("same_prompts", True),
    }
    return [what for what, holds in wrong.items() if holds]


def for_people(report: dict[str, Any]) -> str:
    samples = report["samples"]
    lines = [
        f"{report['faults_witnessed']} of {report['faults_asked']} faults, {report['steps_done']} of "
        f"{report['steps_asked']} steps in {report['seconds']:.0f} s, exit code {report['exit_code']}",
        "samples: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in samples.items() if count != {}),
        f"processes left: {report['processes_left'] or 'none'}; {report['redone']} steps redone after a resume, "
        f"{report['redone_differently']} with another loss",
    ]
    for kind, states in report["by_state"].items():
        if figures := _figures_line(report["by_kind"][kind]):
            met = ", ".join(f"{state} {count}" for state, count in states.items() if count)
            lines += [f"{kind:>10}: {met}", f"{'':>12}{figures}"]
    if undisturbed := report.get("undisturbed"):
        lines.append("against the undisturbed run: " + ", ".join(f"{k} {v}" for k, v in undisturbed.items()))
    if seeds := report.get("fault_free_seeds"):
        lines.append(f"held-out accuracy {report['held_out_accuracy']} against fault-free seeds: {seeds}")
    lines.append("verdict: ok" if report["ok"] else "verdict: failed: " + "; ".join(report["flaws"]))
    return "\n".join(lines)


def _figures_line(figures: dict[str, Any]) -> str:
    if not figures["faults"]:
        return ""
    return (
        f"noticed after {_seconds(figures['noticed_after_median']).strip()}, "
        f"repaired after {_seconds(figures['repaired_after_median']).strip()} (medians), "
        f"at most {figures['steps_redone_max'] or 0} steps redone"
    )
