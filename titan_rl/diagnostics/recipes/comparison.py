"""Arithmetic of a recipe's report: a run beside a published curve, its speed, its agreement, its settings. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from titan_rl.records.metrics import agreement_limit

_NEAR = 0.05
"""Steps apart, as a share of the published step, up to which two points are compared."""
_WARMING = 1
"""First steps that medians leave out, where there are more."""
_OF_PLACE = ("run.dir", "run.plugin_path")
"""Settings that say where a run is, not what it computes."""
_PATHS = ("model.path", "reference.path", "teacher.path", "critic.path", "implicit_reward.path", "reward_model.path")

Points = Sequence[tuple[float, float]]
Record = Mapping[str, float]


@dataclass(frozen=True)
class Pair:
    """Published point, and the run's point that is nearest in steps."""

    step: float
    published: float
    at: float | None = None
    """Step of the run's point; None: the run has none near enough."""
    ours: float | None = None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.published


def beside(published: Points, ours: Points) -> list[Pair]:
    """A pair for each published point. Steps may differ by 5 %, or by one."""
    return [_pair(step, value, ours) for step, value in published]


def _pair(step: float, value: float, ours: Points) -> Pair:
    nearest = min(ours, key=lambda point: abs(point[0] - step), default=None)
    if nearest is None or abs(nearest[0] - step) > max(1.0, _NEAR * step):
        return Pair(step, value)
    return Pair(step, value, *nearest)


def points_of(records: Iterable[Record], metric: str) -> list[tuple[float, float]]:
    """Points (step, value) of a metric."""
    return [(record["step"], record[metric]) for record in records if metric in record]


def steps_of(records: Iterable[Record]) -> list[Record]:
    """Records of updates, without those of evaluations alone."""
    return [record for record in records if "loss" in record]


def median_of(records: Sequence[Record], name: str) -> float | None:
    """Median over updates without the first, which warms up; None where it was not recorded."""
    warm = records[_WARMING:] or records
    values = [record[name] for record in warm if name in record]
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Agreement:
    """Mean over steps, and largest step, of the mean of exp|trainer logprob - sampling logprob|."""

    mean: float
    largest: float
    limit: float | None
    """None: samples are trained off-policy, where no limit holds."""

    @property
    def holds(self) -> bool | None:
        return None if self.limit is None else self.largest <= self.limit


def agreement_of(records: Sequence[Record], settings: Mapping[str, Any]) -> Agreement | None:
    """Agreement of trainer and generator; None where nothing was sampled. ``settings``: flat, by dotted keys."""
    values = [record["agreement_mean"] for record in records if "agreement_mean" in record]
    if not values:
        return None
    is_on_policy = settings.get("rollout.max_staleness") == 0 and settings.get("algorithm.updates_per_batch") == 1
    dtypes = str(settings.get("generator.dtype")), str(settings.get("training.mixed_precision_param"))
    return Agreement(statistics.fmean(values), max(values), agreement_limit(*dtypes) if is_on_policy else None)


@dataclass(frozen=True)
class Difference:
    """Setting whose value in the run is not the recipe's; None: it is not there."""

    key: str
    recipe: Any
    run: Any


def differences(recipe: Mapping[str, Any], run: Mapping[str, Any]) -> list[Difference]:
    """Differences of flat settings, by key."""
    keys = dict.fromkeys(chain(recipe, run))
    found = [Difference(key, recipe.get(key), run.get(key)) for key in keys if key not in _OF_PLACE]
    return [each for each in found if not _is_same(each)]


def _is_same(each: Difference) -> bool:
    return each.recipe == each.run or (each.key in _PATHS and _is_in_cache(str(each.recipe), str(each.run)))


def _is_in_cache(name: str, path: str) -> bool:
    """Whether a path is that of a Hub name in Hugging Face's cache."""
    return name.count("/") == 1 and f"/models--{name.replace('/', '--')}/" in f"{path}/"
