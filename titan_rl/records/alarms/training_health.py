"""What in a run's metrics looks as if its machinery or its policy were unwell, whatever the reward says. Pure.

agreement_drift  trainer and generator come to disagree about the tokens that were sampled
entropy_gone     the policy has become sure of each token, and is often wrong
no_signal        in hardly any group one sample is better than another, and answers are often wrong
no_teacher       no sample has a self-teacher, although answers are right
slow_steps       steps take longer and yield less than those before them
straggler        one actor takes much longer than its peers
"""

import numpy as np

from titan_rl.records.alarms.windows import WINDOW, Record, Records, change, last_mean, worst

DRIFT, DRIFT_RATIO = 0.03, 2.0
"""By how much the disagreement went up (mean of exp|difference| of log-probabilities, less 1), and to how much of what
it was."""
LITTLE_ENTROPY, ENTROPY_LEFT = 0.05, 0.1
"""Nats a token, and what share of the earlier entropy they are."""
OFTEN_WRONG = 0.8
"""Accuracy below which there was something left to learn. Above it a policy may be sure, and groups all right."""
FEW_GROUPS = 0.1
"""Share of groups with samples of different reward."""
SLOWER, LESS = 1.5, 0.5
"""Seconds of a step, and tokens a second, over the median of all steps before."""
STRAGGLES = 1.5
"""Times its peers' median, as in mesh/telemetry/stragglers.py."""


def _agreement_drift(records: Records) -> str:
    """Of samples that the weights at hand drew: older ones differ as they should."""
    apart = change(records, "apart", _apart)
    if apart is None:
        return ""
    is_more_W = apart.is_up_W & (apart.gain_W >= DRIFT) & (apart.last >= DRIFT_RATIO * apart.before_W)
    at = worst(is_more_W, apart.gain_W)
    if at is None:
        return ""
    return (
        f"trainer and generator differed by a factor of {1 + apart.before_W[at]:.4f} at a token, now by "
        f"{1 + apart.last:.4f}"
    )


def _apart(record: Record) -> float | None:
    is_fresh = not record.get("staleness_max") and "agreement_mean" in record
    return record["agreement_mean"] - 1 if is_fresh else None


def _is_often_wrong(records: Records) -> bool:
    accuracy = last_mean(records, "accuracy")
    return accuracy is not None and accuracy < OFTEN_WRONG


def _entropy_collapse(records: Records) -> str:
    entropy = change(records, "entropy")
    if entropy is None or entropy.last >= LITTLE_ENTROPY or not _is_often_wrong(records):
        return ""
    at = worst(entropy.is_down_W & (entropy.last <= ENTROPY_LEFT * entropy.before_W), -entropy.gain_W)
    if at is None:
        return ""
    message = f"the entropy of a token went from {entropy.before_W[at]:.3f} to {entropy.last:.3f} nats"
    return f"{message}, with {last_mean(records, 'accuracy'):.0%} of the answers right"


def _no_signal(records: Records) -> str:
    signal = last_mean(records, "groups_with_signal")
    if signal is None or signal >= FEW_GROUPS or not _is_often_wrong(records):
        return ""
    return (
        f"{signal:.0%} of the groups have samples of different reward, with {last_mean(records, 'accuracy'):.0%} of "
        f"the answers right: a step learns from these alone"
    )


def _no_teacher(records: Records) -> str:
    share, accuracy = last_mean(records, "teacher_fraction"), last_mean(records, "accuracy")
    if share is None or share > 0 or not accuracy:
        return ""
    return f"no sample has a self-teacher, with {accuracy:.0%} of the answers right: do reprompts fit into a row?"


def _slow_steps(records: Records) -> str:
    """Both must hold: shorter answers make fewer tokens a second, and longer ones longer steps."""
    seconds, speed = change(records, "seconds_step"), change(records, "tokens_per_second_step")
    if seconds is None or speed is None:
        return ""
    names = ("seconds_step", "tokens_per_second_step")
    (was, took), (gave, gives) = (_medians(records.column(name).values[: len(records)]) for name in names)
    if took < SLOWER * was or gives > LESS * gave:
        return ""
    return f"steps took {was:.2f} s and now {took:.2f}, at {gave:.0f} tokens a second and now {gives:.0f}"


def _medians(values: np.ndarray) -> tuple[float, float]:
    """Of all before the last window, and of that."""
    return float(np.median(values[:-WINDOW])), float(np.median(values[-WINDOW:]))


def _straggler(records: Records) -> str:
    kinds = sorted({name for record in records.last(WINDOW) for name in record if name.startswith("slowest_")})
    ratios = {kind: ratio for kind in kinds if (ratio := last_mean(records, kind)) is not None and ratio >= STRAGGLES}
    if not ratios:
        return ""
    kind = max(ratios, key=lambda kind: ratios[kind])
    actor = kind.removeprefix("slowest_").replace("_", " ")
    return f"the slowest {actor} takes {ratios[kind]:.1f} times its peers' median (events.jsonl names it)"


LOOKS = {
    "agreement_drift": _agreement_drift,
    "entropy_gone": _entropy_collapse,
    "no_signal": _no_signal,
    "no_teacher": _no_teacher,
    "slow_steps": _slow_steps,
    "straggler": _straggler,
}
