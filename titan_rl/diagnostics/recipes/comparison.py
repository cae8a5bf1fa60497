"""Arithmetic of a recipe's report: points of a run and of a curve, medians, agreement, settings. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from titan_rl.config.sections.precision import uses_fp8
from titan_rl.records.metrics import agreement_limit

_TOLERANCE = 0.05
"""Distance in steps, as a share of the reference's step, up to which two points are compared."""
WARMUP_STEPS = 1
"""First steps that medians leave out, where there are more."""
LOCATION_KEYS = ("run.dir", "run.plugin_path")
"""Settings that say where a run is, not what it computes."""
_MODELS = ("model", "reference", "teacher", "critic", "implicit_reward", "drafter", "reward_model")
PATH_KEYS = (
    *(f"{role}.path" for role in _MODELS),
    "generator.speculative.model",
)

Points = Sequence[tuple[float, float]]
Record = Mapping[str, float]


class Pair(NamedTuple):
    """Point of a reference curve, and the run's point at nearly the same step."""

    step: float
    reference: float
    measured_step: float | None = None
    """None: the run has no point near enough."""
    measured: float | None = None


class Difference(NamedTuple):
    """Setting whose value in the run is not the recipe's; None: it is not there."""

    key: str
    recipe: Any
    run: Any


def compare(reference: Points, measured: Points) -> list[Pair]:
    """Pair for each point of the reference.

    A point of the run belongs to the nearest point of the reference alone, at most 5 % or one step away; step 0, before
    any update, to step 0 alone.
    """
    nearest: dict[int, tuple[float, float]] = {}
    for point in measured:
        number = min(range(len(reference)), key=lambda place: abs(reference[place][0] - point[0]), default=None)
        if number is None or not _is_near(reference[number][0], point[0]):
            continue
        step = reference[number][0]
        if number not in nearest or abs(point[0] - step) < abs(nearest[number][0] - step):
            nearest[number] = point
    return [Pair(*point, *nearest.get(number, ())) for number, point in enumerate(reference)]


def _is_near(reference: float, step: float) -> bool:
    return (reference == 0) == (step == 0) and abs(step - reference) <= max(1.0, _TOLERANCE * reference)


def points_of(records: Iterable[Record], metric: str) -> list[tuple[float, float]]:
    """Points (step, value) of a metric."""
    return [(record["step"], record[metric]) for record in records if metric in record]


def steps_of(records: Iterable[Record]) -> list[Record]:
    """Records of updates, without those of evaluations alone."""
    return [record for record in records if "loss" in record]


def median_of(records: Sequence[Record], name: str) -> float | None:
    """Median over updates without the first, which warms up; None where it was not recorded, NaN if any is not
    finite."""
    values = [record[name] for record in records[WARMUP_STEPS:] or records if name in record]
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.median(values) if values else None


def agreements_of(records: Sequence[Record]) -> list[float]:
    """Mean of exp|trainer logprob - sampling logprob| of each step."""
    return [record["agreement_mean"] for record in records if "agreement_mean" in record]


def largest_of(values: Sequence[float]) -> float:
    """Largest value; NaN if any is not finite."""
    return max(values) if all(map(math.isfinite, values)) else math.nan


def is_within(agreements: Sequence[float], limit: float) -> bool:
    """Whether every step's agreement is a finite number up to the limit."""
    return largest_of(agreements) <= limit


def limit_of(settings: Mapping[str, Any]) -> float | None:
    """Limit of agreement; None for a run with stale samples, where none holds. ``settings``: flat, by dotted keys."""
    dtypes = str(settings.get("generator.dtype")), str(settings.get("training.mixed_precision_param"))
    if settings.get("rollout.max_staleness") != 0:
        return None
    is_invariant = settings.get("debug.batch_invariant", False)
    return agreement_limit(*dtypes, fp8=uses_fp8(settings), batch_invariant=is_invariant)


def differences(recipe: Mapping[str, Any], run: Mapping[str, Any]) -> list[Difference]:
    """Differences of flat settings, by key."""
    keys = dict.fromkeys(chain(recipe, run))
    found = [Difference(key, recipe.get(key), run.get(key)) for key in keys if key not in LOCATION_KEYS]
    return [each for each in found if not _is_same(each)]


def _is_same(each: Difference) -> bool:
    is_path = each.key in PATH_KEYS or each.key.startswith("teacher.by_task.")
    return each.recipe == each.run or (is_path and _is_in_cache(str(each.recipe), str(each.run)))


def _is_in_cache(name: str, path: str) -> bool:
    """Whether a path is that of a Hub name in Hugging Face's cache."""
    return name.count("/") == 1 and f"/models--{name.replace('/', '--')}/" in f"{path}/"
