"""Figures of each stage, by what its command printed or its run wrote."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.thresholds import Bar

Figures = dict[str, Any]
_PLANNED = re.compile(r"GPU 0: ([\d.]+) GiB")
_UP = re.compile(r"up after ([\d.]+) s")


def figures_of_run(root: Path, begun: float, seconds: float, gpu_mib: float | None) -> Figures:
    """``begun``: when its command began, in Unix time; ``seconds``: the whole command took; ``gpu_mib``: the most that
    the GPU had in use meanwhile."""
    log, summary = (root / "log.txt").read_text(), json.loads((root / "summary.json").read_text())
    metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "seconds_step" in row]
    figures: Figures = {
        "seconds_whole": seconds,
        "seconds_to_first_step": _first_update(root) - begun,
        "seconds_sft": summary["seconds_sft"],
        "seconds_first_step": steps[0]["seconds_step"],
        "agreement_mean": max(row["agreement_mean"] for row in steps),
    }
    if match := _UP.search(log):
        figures["seconds_until_up"] = float(match[1])
    for name in ("step", "generate", "forward_backward", "weight_sync"):
        if values := [row[f"seconds_{name}"] for row in steps[1:] if f"seconds_{name}" in row]:
            figures[f"seconds_{name}"] = statistics.median(values)
    if shares := [_share_between(row) for row in steps[1:]]:
        figures["share_between"] = statistics.median(shares)
    if gpu_mib is not None and (match := _PLANNED.search(log)):
        figures |= {"planned_gib": float(match[1]), "used_gib": gpu_mib / 1024}
        figures["used_of_planned"] = figures["used_gib"] / figures["planned_gib"]
    return figures


def _first_update(root: Path) -> float:
    """End of the first optimizer step of reinforcement learning, in Unix time."""
    spans = json.loads((root / "trace.jsonl").read_text().splitlines()[0])["spans"]
    return next(start + duration for _, what, start, duration in spans if what == "optimizer")


def _share_between(step: dict[str, float]) -> float:
    """Part of a step in which rollouts are not waited for, and nothing is trained: turns, weights, packing, records."""
    busy = sum(step.get(f"seconds_{name}", 0.0) for name in ("wait", "forward_backward", "optimizer"))
    return 1 - busy / step["seconds_step"]


def figures_of_trl(log: str) -> Figures:
    seconds = [float(line.split()[1]) for line in log.splitlines() if line.startswith("seconds ")]
    return {"seconds_step": statistics.median(seconds[1:])} if seconds[1:] else {}


def ratio_to_trl(ours: Figures, trl: Figures) -> Figures:
    """Nothing where one of the two has not come to a step."""
    both = "seconds_step" in ours and "seconds_step" in trl
    return {"ours_over_trl": ours["seconds_step"] / trl["seconds_step"]} if both else {}


def figures_of_check(log: str) -> Figures:
    """Rows of gpu_check.py: whether each holds, and the trainer's share of the matrix rate."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    figures: Figures = {f"{line['row']} holds": line["holds"] for line in lines if "row" in line}
    for line in lines:
        if "share_of_matrix_rate" in line.get("figures", {}):
            figures[f"{line['row']} share"] = line["figures"]["share_of_matrix_rate"]
    return figures


def figures_of_kernels(log: str) -> Figures:
    """Rows of kernels/bench.py of our own kernels: share of the floor, by kernel and shape."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith('{"kernel"')]
    ours = [line for line in lines if line["by"] == "triton" and "of_floor" in line]
    return {f"{line['kernel']} {line['shape']}": line["of_floor"] for line in ours}


def figures_of_tests(log: str) -> Figures:
    counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?)", log)}
    return {"passed": counts.get("passed", 0), "failed": counts.get("failed", 0) + counts.get("error", 0)}


def judged(stage: str, bars: Sequence[Bar], figures: Figures) -> list[dict[str, Any]]:
    """Rows of the table: a stage's bars first, then its other figures."""
    rows = [bar.judge(figures, on_gpu=True) | {"figure": bar.figure} for bar in bars]
    barred = {bar.figure for bar in bars}
    rows += [{"figure": name, "value": value, "met": None} for name, value in figures.items() if name not in barred]
    return [{"stage": stage, "bar": "", **row} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| stage | figure | value | bar | met |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        met = {True: "yes", False: "no", None: ""}[row["met"]]
        lines.append(f"| {row['stage']} | {row['figure']} | {_short(row['value'])} | {row['bar']} | {met} |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
