"""summary.json: the result of a run, written however the run ended."""

import json
import statistics
import time
from dataclasses import dataclass, field

from titan_rl.data.files import replace_text, unless_full
from titan_rl.records.metrics import read_metrics
from titan_rl.records.rundir import RunDir, package_versions
from titan_rl.records.statistics import Proportion


@dataclass
class Progress:
    """What only the controller knows of a run, updated as it goes."""

    steps_asked: int
    started: float = field(default_factory=time.perf_counter)
    """On the performance counter."""
    step: int = 0
    held_out_before: Proportion | None = None
    held_out_after: Proportion | None = None
    seconds_to_first_step: float | None = None
    seconds_sft: float = 0.0
    seconds_training: float = 0.0


def _median_by_prefix(records: list[dict], prefix: str) -> dict[str, float]:
    names = sorted({name for record in records for name in record if name.startswith(prefix)})
    return {
        name.removeprefix(prefix): statistics.median(record[name] for record in records if name in record)
        for name in names
    }


def write_summary(run_dir: RunDir, progress: Progress, why_ended: str, account: dict[str, int]) -> dict:
    """Returns what it wrote, or would have if the disk is full."""
    records = [record for record in read_metrics(run_dir.root) if "reward" in record]
    before, after = progress.held_out_before, progress.held_out_after
    summary = {
        "why_ended": why_ended,
        "steps_done": progress.step,
        "steps_asked": progress.steps_asked,
        "held_out_before": before.as_dict() if before else None,
        "held_out_after": after.as_dict() if after else None,
        "reward_by_step": [record["reward"] for record in records],
        "seconds_to_first_step": progress.seconds_to_first_step,
        "seconds_sft": progress.seconds_sft,
        "seconds_training": progress.seconds_training,
        "seconds_by_phase_median": _median_by_prefix(records, "seconds_"),
        "tokens_per_second_median": _median_by_prefix(records, "tokens_per_second_"),
        "agreement_mean_max": max((record["agreement_mean"] for record in records), default=None),
        "agreement_max": max((record["agreement_max"] for record in records), default=None),
        "staleness_max": max((record["staleness_max"] for record in records), default=None),
        "samples": account,
        "versions": package_versions(),
    }
    with unless_full():
        replace_text(run_dir.summary, json.dumps(summary, indent=2) + "\n")
    return summary
