"""Comparison with runs without faults: the same run, and the same with other seeds."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.diagnostics.chaos.audit import step_values, summary, trained_prompts

_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles for 1, 2, ... degrees of freedom."""
MAX_SEEDS = len(_STUDENT_T) + 1


def against_undisturbed(root: Path, undisturbed: Path) -> dict[str, Any]:
    """Two run directories: were the same prompts trained, and were each step's numbers the same, bit for bit?

    The loss of an on-policy step is close to 0 for any data, so gradient norms are compared, too.
    """
    comparison = compare_prompts(trained_prompts(root), trained_prompts(undisturbed))
    for name, plural in (("loss", "losses"), ("grad_norm", "grad_norms")):
        comparison |= compare_steps(step_values(root, name), step_values(undisturbed, name), plural)
    return comparison


def compare_prompts(steps: Mapping[str, int | None], baseline: Mapping[str, int | None]) -> dict[str, Any]:
    """Comparison of trained prompts. Both: prompt to the step that it was trained at. Pure."""
    differ = steps.keys() ^ baseline.keys()
    return {
        "same_prompts": not differ,
        "prompts_that_differ": len(differ),
        "prompts_at_another_step": sum(steps[prompt] != baseline[prompt] for prompt in steps.keys() & baseline.keys()),
    }


def compare_steps(values: dict[int, float], baseline: dict[int, float], plural: str) -> dict[str, Any]:
    """Comparison of a metric's steps, bit for bit.

    Both: step to number. ``plural`` names the numbers in the result. Pure.
    """
    steps = sorted(values.keys() | baseline.keys())
    differ = [step for step in steps if values.get(step) != baseline.get(step)]
    return {
        f"{plural}_equal": len(steps) - len(differ),
        f"{plural}_compared": len(steps),
        f"first_{plural}_that_differ": differ[0] if differ else None,
    }


def held_out_accuracy(root: Path) -> float | None:
    return (summary(root).get("held_out_after") or {}).get("accuracy")


def among_seeds(accuracy: float | None, others: list[float | None]) -> dict[str, Any]:
    """Whether an accuracy is among what fault-free runs with other seeds reach. Pure.

    ``interval`` holds the accuracy of one more such run with 95 % probability: mean ± t s √(1 + 1/n), where t is
    Student's with n - 1 degrees of freedom.
    """
    measured = [value for value in others if value is not None]
    if len(measured) < 2:
        return {"accuracies": others, "interval": None, "range": None, "inside": False}
    half = _STUDENT_T[len(measured) - 2] * statistics.stdev(measured) * math.sqrt(1 + 1 / len(measured))
    low, high = max(statistics.mean(measured) - half, 0.0), min(statistics.mean(measured) + half, 1.0)
    return {
        "accuracies": others,
        "interval": [low, high],
        "range": [min(measured), max(measured)],
        "inside": accuracy is not None and len(measured) == len(others) and low <= accuracy <= high,
        "inside_range": accuracy is not None and min(measured) <= accuracy <= max(measured),
    }
