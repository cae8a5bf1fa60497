"""Alarms of a policy or a machinery that is unwell: raised by made-up streams of metrics, silent on healthy ones."""

import numpy as np
import pytest

from titan_rl.controller.console.alarm_watch import AlarmWatch
from titan_rl.records.alarms.alarms import NAMES, REWARD_HACKING, history
from titan_rl.records.alarms.training_health import LOOKS
from titan_rl.records.alarms.windows import WINDOW

STEPS = 60
HEALTHY = dict(
    reward=(0.2, 0.8),
    accuracy=(0.2, 0.8),
    agreement_mean=(1.01, 1.015),
    staleness_max=(0, 0),
    entropy=(1.5, 0.2),
    groups_with_signal=(0.5, 0.6),
    seconds_step=(2.0, 2.1),
    tokens_per_second_step=(500, 480),
    slowest_generator=(1.05, 1.1),
)


def series(seed=0, noise=0.03, **columns) -> list[dict[str, float]]:
    """Records whose columns go from one value to another between a third and two thirds of the run, with noise."""
    chance, records = np.random.RandomState(seed), []
    for step in range(1, STEPS + 1):
        share = min(max(step / STEPS - 1 / 3, 0.0) * 3, 1.0)
        record: dict[str, float] = {"step": step, "reward_min": 0.0, "reward_max": 1.0}
        for name, (first, last) in (HEALTHY | columns).items():
            level = first + share * (last - first)
            if name == "agreement_mean":
                level = 1 + (level - 1) * (1 + noise * chance.randn())
            else:
                level += noise * abs(level) * chance.randn()
            record[name] = float(level)
        records.append(record)
    return records


def raised(records) -> set[str]:
    return {alarm.name for alarm in history(records)}


RAISED = [
    (dict(agreement_mean=(1.01, 1.12)), "agreement_drift"),
    (dict(agreement_mean=(1.000001, 1.2)), "agreement_drift"),
    (dict(entropy=(1.5, 0.01), accuracy=(0.2, 0.4)), "entropy_gone"),
    (dict(groups_with_signal=(0.5, 0.02), accuracy=(0.2, 0.4)), "no_signal"),
    (dict(groups_with_signal=(0.03, 0.03), accuracy=(0.01, 0.01)), "no_signal"),
    (dict(teacher_fraction=(0.4, 0.0), accuracy=(0.3, 0.3)), "no_teacher"),
    (dict(seconds_step=(2.0, 5.0), tokens_per_second_step=(500, 200)), "slow_steps"),
    (dict(slowest_generator=(1.05, 2.4)), "straggler"),
    (dict(slowest_trainer=(1.0, 1.9)), "straggler"),
]
SILENT = [
    {},
    dict(agreement_mean=(1.05, 1.06)),  # bf16 all along
    dict(agreement_mean=(1.000001, 1.00001)),  # ten times as much of nothing
    dict(agreement_mean=(1.01, 1.3), staleness_max=(0.5, 3)),  # older samples differ as they should
    dict(entropy=(1.5, 0.01), accuracy=(0.2, 0.99)),  # it knows the answers
    dict(entropy=(0.03, 0.02), accuracy=(0.4, 0.4)),  # it was sure from the beginning
    dict(groups_with_signal=(0.6, 0.02), accuracy=(0.2, 0.99)),  # all right
    dict(teacher_fraction=(0.4, 0.0), accuracy=(0.0, 0.0)),  # nothing that a teacher could read
    dict(seconds_step=(2.0, 5.0), tokens_per_second_step=(500, 500)),  # longer answers
    dict(seconds_step=(2.0, 1.0), tokens_per_second_step=(500, 200)),  # shorter ones
    dict(slowest_generator=(1.3, 1.4)),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("columns", "wanted"), RAISED)
def test_what_is_unwell_is_named_and_nothing_else(columns, wanted, seed):
    alarms = [alarm for alarm in history(series(seed, **columns)) if alarm.name in LOOKS]
    assert {alarm.name for alarm in alarms} == {wanted}
    assert all(any(character.isdigit() for character in alarm.says) for alarm in alarms), "numbers are the evidence"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("columns", SILENT)
def test_no_false_alarm(columns, seed):
    assert not raised(series(seed, **columns))


LOOKED_AT = {
    "agreement_drift": {"agreement_mean"},
    "entropy_gone": {"entropy", "accuracy"},
    "no_signal": {"groups_with_signal", "accuracy"},
    "no_teacher": {"teacher_fraction", "accuracy"},
    "slow_steps": {"seconds_step", "tokens_per_second_step"},
}
"""The metrics without which an alarm cannot be raised; a straggler's is the one that its case moves."""


@pytest.mark.parametrize("gone", HEALTHY)
@pytest.mark.parametrize(("columns", "wanted"), RAISED)
def test_what_was_not_recorded_is_not_looked_at(columns, wanted, gone):
    """A record without a reward is none of a step."""
    records = series(**columns)
    for record in records:
        record.pop(gone)
    needed = {"reward"} | LOOKED_AT.get(wanted, set(columns))
    alarms = {alarm.name for alarm in history(records, LOOKS)}
    assert alarms == (set() if gone in needed else {wanted})


def held_out(records, first: float, last: float, every: int = 15):
    for record in records[every - 1 :: every]:
        share = (record["step"] - every) / (STEPS - every)
        record["held_out_accuracy"] = first + share * (last - first)
    return records


@pytest.mark.parametrize("seed", range(3))
def test_a_held_out_accuracy_that_does_not_follow_is_an_alarm(seed):
    assert "held_out_gap" in raised(held_out(series(seed), 0.2, 0.22))
    assert "held_out_gap" not in raised(held_out(series(seed), 0.2, 0.6))
    assert "held_out_gap" not in raised(held_out(series(seed, reward=(0.4, 0.45)), 0.3, 0.3))
    assert "held_out_gap" not in raised(held_out(series(seed), 0.2, 0.2, every=STEPS - 1)), "one compares nothing"


def test_a_run_says_it_with_its_evidence_and_sends_nobody_to_another_command(tmp_path):
    said, events, records = [], [], series(slowest_generator=(1.05, 2.4))
    watch = AlarmWatch(tmp_path, log=said.append, record_event=lambda kind, **fields: events.append(fields))
    metrics = [watch.update(record) for record in records]
    assert set(metrics[0]) == {f"alarm_{name}" for name in NAMES}
    assert metrics[-1]["alarm_straggler"] == 1.0
    [line], [event] = said, events
    assert "ALARM straggler: the slowest generator takes" in line and "hack-check" not in line
    assert event["name"] == "straggler"


def test_an_evaluation_of_the_run_reaches_the_alarms(tmp_path):
    said: list[str] = []
    watch = AlarmWatch(tmp_path, log=said.append, record_event=lambda kind, **fields: None)
    for record in series():
        watch.update(record)
        if record["step"] % WINDOW == 0:
            watch.evaluated(record["step"], 0.2)
    assert any("ALARM held_out_gap" in line and "hack-check" in line for line in said)


def test_what_is_gamed_is_told_apart_from_what_is_unwell():
    assert set(REWARD_HACKING) | set(LOOKS) == set(NAMES) and not set(REWARD_HACKING) & set(LOOKS)
