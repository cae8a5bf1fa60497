"""summary.json: the result of a run, written however the run ended."""

import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from titan_rl.data.storage.files import replace_text, unless_full
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir, package_versions
from titan_rl.records.statistics import Proportion

COMPLETED = "completed"
"""Why a run ended that did all that was asked."""


@dataclass
class Progress:
    """Progress of a run that only the controller has, updated as it goes."""

    steps_asked: int
    started: float = field(default_factory=time.perf_counter)
    """On the performance counter."""
    step: int = 0
    model_step: int | None = None
    """Step of the model that this start has written."""
    held_out_before: Proportion | None = None
    held_out_after: Proportion | None = None
    seconds_to_first_step: float | None = None
    seconds_sft: float = 0.0
    seconds_training: float = 0.0


def _median_by_prefix(records: list[dict[str, float]], prefix: str) -> dict[str, float]:
    names = sorted({name for record in records for name in record if name.startswith(prefix)})
    return {
        name.removeprefix(prefix): statistics.median(record[name] for record in records if name in record)
        for name in names
    }


def _largest(records: list[dict[str, float]], name: str) -> float | None:
    return max((record[name] for record in records if name in record), default=None)


def _mean(records: list[dict[str, float]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return statistics.fmean(values) if values else None


def write_summary(run_dir: RunDir, progress: Progress, why_ended: str, account: dict[str, int]) -> dict[str, Any]:
    """Returns what it wrote, or would have if the disk is full."""
    all_records = list(read_metrics(run_dir.root))
    records = [record for record in all_records if "loss" in record]
    before, after = progress.held_out_before, progress.held_out_after
    summary = {
        "why_ended": why_ended,
        "steps_done": progress.step,
        "steps_asked": progress.steps_asked,
        "held_out_before": before.as_dict() if before else None,
        "held_out_after": after.as_dict() if after else None,
        "reward_by_step": [record["reward"] for record in records if "reward" in record],
        "truncated_mean": _mean(records, "truncated"),
        "helper_token_share_mean": _mean(records, "helper_token_share"),
        "steps_without_signal": sum(record.get("groups_with_signal") == 0 for record in records),
        "loss_by_step": [record["loss"] for record in records],
        "held_out_loss": [record["held_out_loss"] for record in all_records if "held_out_loss" in record],
        "seconds_to_first_step": progress.seconds_to_first_step,
        "seconds_sft": progress.seconds_sft,
        "seconds_training": progress.seconds_training,
        "seconds_by_phase_median": _median_by_prefix(records, "seconds_"),
        "tokens_per_second_median": _median_by_prefix(records, "tokens_per_second_"),
        "agreement_mean_max": _largest(records, "agreement_mean"),
        "agreement_max": _largest(records, "agreement_max"),
        "staleness_max": _largest(records, "staleness_max"),
        "samples": account,
        "versions": package_versions(),
    }
    with unless_full():
        replace_text(run_dir.summary, json.dumps(summary, indent=2) + "\n")
    return summary
