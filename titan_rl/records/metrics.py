"""What each step measured: one flat record, to JSON lines, TensorBoard and the terminal."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config.io.bounded_files import read_lines
from titan_rl.data.numbers import all_equal, all_zero
from titan_rl.data.storage.files import LineFile
from titan_rl.data.types import EngineStatistics, Group, Provenance, Rollout, StepMetrics, is_model
from titan_rl.environments.registry import correct
from titan_rl.records.trackers import Trackers

UPDATE_LEFT_OUT = "update_left_out"
"""Of a step on data that counts as done although non-finite values kept its update from being applied."""


def sampling_metrics(groups: list[Group], version: int, thinking_budget: int = 0) -> dict[str, float]:
    """Metrics of a step's sampled groups, independent of what was trained. ``thinking_budget``: the run's, 0: none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = _scored(rollouts)
    lags = [version - int(r.versions[is_model(r.provenance)].min()) for r in scored if r.num_model_tokens]
    return {
        **_with_range("reward", [r.reward for r in scored]),
        **({} if scored[0].task_reward is None else {"task_reward": float(np.mean([r.true_reward for r in scored]))}),
        **_with_range("grade", [r.grade for r in scored if r.grade is not None]),
        "effective_answers": effective_number(Counter(r.text.strip() for r in scored)),
        "accuracy": float(np.mean([correct(r.true_reward) for r in scored])),
        "response_length": float(np.mean([r.num_model_tokens for r in rollouts])),
        **part_metrics(scored),
        **turn_metrics(rollouts),
        **task_metrics(groups),
        **_retries(groups),
        **seat_metrics(scored),
        **mask_metrics(rollouts),
        **routing_metrics(rollouts),
        **(thinking_metrics(rollouts) if thinking_budget else {}),
        "truncated": float(np.mean([r.status == "truncated" for r in rollouts])),
        "groups_with_signal": float(np.mean([_has_signal(group.rollouts) for group in groups])),
        "staleness_mean": float(np.mean(lags)),
        "staleness_max": max(lags),
    }


def _retries(groups: list[Group]) -> dict[str, float]:
    """Times that prompts were sampled again since a sample could not be scored; empty for none."""
    count = sum(group.score_retries for group in groups)
    return {"score_retries": count} if count else {}


def routing_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Size of all routed experts in MiB; empty without any."""
    sizes = [rollout.routed_experts.nbytes for rollout in rollouts if rollout.routed_experts is not None]
    return {"routed_experts_mib": sum(sizes) / 2**20} if sizes else {}


def mask_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Size of all sampling masks in MiB, and the mean number of tokens that one was sampled from; empty without any."""
    masked = [(r.mask, np.flatnonzero(is_model(r.provenance))) for r in rollouts if r.mask is not None]
    if not masked:
        return {}
    kept = np.concatenate([mask.take(wrote).num_kept for mask, wrote in masked])
    mebibytes = sum(mask.nbytes for mask, _ in masked) / 2**20
    return {"sampling_mask_mib": mebibytes, "sampled_from_mean": float(kept.mean()) if len(kept) else 0.0}


def thinking_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Share of rollouts whose thinking a budget closed."""
    return {"thinking_closed": float(np.mean([(r.provenance == Provenance.FORCED).any() for r in rollouts]))}


def _scored(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.is_scored]


def task_metrics(groups: list[Group]) -> dict[str, float]:
    """Share of prompts, and mean reward and accuracy of scored answers, of each task of a mixture."""
    metrics: dict[str, float] = {}
    for task in sorted({group.task for group in groups if group.task}):
        own = [group for group in groups if group.task == task]
        metrics[f"prompts/{task}"] = len(own) / len(groups)
        if scored := _scored(rollout for group in own for rollout in group.rollouts):
            metrics[f"reward/{task}"] = float(np.mean([rollout.reward for rollout in scored]))
            metrics[f"accuracy/{task}"] = float(np.mean([correct(rollout.true_reward) for rollout in scored]))
    return metrics


def part_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """The mean of each part of the reward, over the rollouts that have it; nothing where there is one part alone."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward_part/{name}": float(np.mean(its)) for name, its in values.items()} if len(values) > 1 else {}


def seat_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward of each seat of a multi-player episode."""
    seats = sorted({rollout.seat for rollout in rollouts} - {""})
    return {f"reward/{seat}": float(np.mean([r.reward for r in rollouts if r.seat == seat])) for seat in seats}


def turn_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Turns and tool calls per rollout, shares of environment tokens, of rollouts that ran out of turns, and of failed
    and timed-out calls.

    Empty for single-turn rollouts.
    """
    if all(len(rollout.turns) < 2 for rollout in rollouts):
        return {}
    calls = Counter(call.status for rollout in rollouts for turn in rollout.turns for call in turn.calls)
    num_tokens = sum(len(rollout.tokens) for rollout in rollouts)
    replied = sum(int((rollout.provenance == Provenance.TOOL).sum()) for rollout in rollouts)
    metrics = {
        "turns": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "reply_tokens": replied / num_tokens,
        "max_turns": float(np.mean([rollout.status == "max_turns" for rollout in rollouts])),
    }
    if calls:
        metrics["tool_calls"] = calls.total() / len(rollouts)
        metrics |= {f"tool_calls_{status}": calls[status] / calls.total() for status in ("error", "timeout")}
    return metrics


def _with_range(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: float(np.mean(values)), f"{name}_min": float(min(values)), f"{name}_max": float(max(values))}


def effective_number(counts: Counter[str]) -> float:
    """Effective number of different answers: the exponential of the entropy of their shares, from 1 (all alike) to
    their count.

    Source: Hill 1973, Ecology 54, 427-432 (order 1).
    """
    share_N = np.array(list(counts.values()), np.float64) / counts.total()
    return float(np.exp(-(share_N * np.log(share_N)).sum()))


def _has_signal(rollouts: list[Rollout]) -> bool:
    """By the advantages that a loop of one's own gave, or else by rewards."""
    given = [rollout.advantage for rollout in rollouts if rollout.advantage is not None]
    return not (all(map(all_zero, given)) if given else all_equal(rollout.reward for rollout in _scored(rollouts)))


def mean_metrics(metrics: list[StepMetrics]) -> StepMetrics:
    """Over a batch's optimizer steps: sums of counts and seconds, the maximum of a maximum, means of all others."""
    columns = _columns([vars(m) for m in metrics])
    of_updates = columns.pop("loss_metrics")  # a task may have no tokens in one of them
    names = dict.fromkeys(name for update in of_updates for name in update)
    loss_metrics = {name: _mean([update[name] for update in of_updates if name in update]) for name in names}
    merged: dict[str, Any] = {name: _merge(name, values) for name, values in columns.items()}
    return StepMetrics(**merged, loss_metrics=loss_metrics)


def _columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [record[name] for record in records] for name in records[0]}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _merge(name: str, values: list[float]) -> float:
    if name.startswith(("num_", "seconds_")):
        return sum(values)
    return max(values) if name.endswith("_max") else _mean(values)


def trained_metrics(step: StepMetrics) -> dict[str, float]:
    """Metrics of a step's update, under the names of its record, with the loss's own metrics beside them."""
    record = asdict(step)
    record |= record.pop("loss_metrics")
    return {name: value for name, value in record.items() if not name.startswith("seconds_")}


def agreement_limit(
    generator_dtype: str, trainer_dtype: str, *, fp8: bool = False, batch_invariant: bool = False
) -> float:
    """Mean of exp|trainer logprob - sampling logprob| above which something is wrong, if no sample is stale.

    Rounding alone makes the two differ: seen were 1.000001 in fp32 and up to 1.03 in bf16. With FP8, on one side or on
    both, it was up to 1.06 for a tiny model, and 1.25 for SmolLM2. With ``batch_invariant`` both have equal bits.
    """
    if batch_invariant:
        return 1.0
    if fp8:
        return 1.5
    return 1.001 if generator_dtype == trainer_dtype == "float32" else 1.15


def speeds(seconds: dict[str, float], generated: int, trained: int) -> dict[str, float]:
    """Tokens a second of each phase: generated ones, or those that went through the trainer."""
    tokens = {"generate": generated, "score": generated, "forward_backward": trained, "step": generated}
    return {f"tokens_per_second_{phase}": count / max(seconds[phase], 1e-9) for phase, count in tokens.items()}


def bytes_between_hosts(statistics: list[EngineStatistics]) -> dict[str, float]:
    """Bytes of a step's weights sent over TCP to all generators: from the trainers, and relayed. Empty where none went
    that way."""
    trainers = sum(engine.bytes_from_trainers for engine in statistics)
    generators = sum(engine.bytes_from_generators for engine in statistics)
    if not trainers + generators:
        return {}
    return {"weight_bytes_from_trainers": trainers, "weight_bytes_from_generators": generators}


def draft_metrics(statistics: list[EngineStatistics]) -> dict[str, float]:
    """Tokens that were drafted in a step, and the share of them that answers are made of: 0 where none was drafted."""
    drafted = sum(engine.num_drafted for engine in statistics)
    accepted = sum(engine.num_accepted for engine in statistics)
    return {"draft_tokens": drafted, "draft_acceptance_rate": accepted / max(drafted, 1)}


def cache_metrics(statistics: list[EngineStatistics]) -> dict[str, float]:
    """Use of the engines' KV caches in a step, and the mean number of requests that an engine ran at once."""
    num_steps = sum(engine.num_steps for engine in statistics)
    return {
        "preemptions": sum(engine.num_preemptions for engine in statistics),
        "kv_cache_usage_max": max((engine.kv_cache_usage_max for engine in statistics), default=0.0),
        "running_requests_mean": sum(engine.num_running for engine in statistics) / max(num_steps, 1),
    }


def helper_metrics(statistics: list[EngineStatistics], helpers: range) -> dict[str, float]:
    """Share of a step's tokens that helper generators sampled. ``helpers``: their numbers."""
    by_helpers = sum(engine.num_tokens for engine in statistics if engine.generator in helpers)
    return {"helper_token_share": by_helpers / max(sum(engine.num_tokens for engine in statistics), 1)}


class MetricsLog:
    """Writer of ``metrics.jsonl`` and of the trackers beside it."""

    def __init__(self, root: Path, trackers: Trackers | None = None) -> None:
        self._file, self._trackers = LineFile(root / "metrics.jsonl"), trackers

    def write(self, record: dict[str, float]) -> None:
        """Append a step's record, whose number is ``step``. Errors: DiskFull."""
        self._file.write(json.dumps(record))
        if self._trackers is not None:
            self._trackers.log(record)

    def close(self) -> None:
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def read_metrics(root: Path) -> Iterator[dict[str, float]]:
    """Records of a run directory in order; a step that was done again after a resume counts once, the last time.

    A line that is no record is passed over, such as one that the process died in.
    """
    return iter(MetricsReader(root).records_after(-1))


class MetricsReader:
    """Incremental ``read_metrics``: lines that were read before are not read again."""

    def __init__(self, root: Path) -> None:
        self._path = root / "metrics.jsonl"
        self._records: dict[int, dict[str, float]] = {}
        self._num_bytes = 0
        """Of the whole lines that were read."""

    def records_after(self, step: int) -> list[dict[str, float]]:
        """Records of later steps, in order."""
        self._read_on()
        return [self._records[number] for number in sorted(number for number in self._records if number > step)]

    def _read_on(self) -> None:
        if not self._path.exists():
            return
        for line in read_lines(self._path, start=self._num_bytes):
            self._num_bytes += len(line) if line.endswith(b"\n") else 0  # one that is being written is read again
            if record := _as_record(line.decode(errors="replace")):
                step = int(record["step"])
                self._records[step] = self._records.get(step, {}) | record


def _as_record(line: str) -> dict[str, float] | None:
    """Numbers by name, ``step`` among them; None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or record["step"] < 0:
        return None
    numbers = (
        isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63) for value in record.values()
    )
    return record if all(numbers) else None
