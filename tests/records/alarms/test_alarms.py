"""Alarms: raised where a reward is gamed, silent on healthy runs, pure functions of a run's records."""

import json

import numpy as np
import pytest

from titan_rl.cli import main
from titan_rl.controller.console.alarm_watch import AlarmWatch
from titan_rl.data.types import Group, Provenance, Rollout
from titan_rl.records.alarms.alarms import NAMES, WINDOW, history, standing
from titan_rl.records.metrics import effective_number, sampling_metrics
from titan_rl.records.run_directory.rundir import RunDir

STEPS = 60
HEALTHY = dict(reward=(0.2, 0.9), grade=(0.2, 0.85), response_length=(30, 40), truncated=(0.1, 0.02))
HEALTHY |= dict(effective_answers=(100, 4))


def series(steps=STEPS, noise=0.03, seed=0, start=0.3, **columns) -> list[dict[str, float]]:
    """Records of a run whose columns go from one value to another, from a part of it on, with noise in proportion."""
    chance, records = np.random.RandomState(seed), []
    for step in range(1, steps + 1):
        share = min(max((step / steps - start) / (0.7 - start), 0.0), 1.0)
        record = {"step": step, "reward_min": 0.0, "reward_max": 1.0, "grade_min": 0.0, "grade_max": 1.0}
        for name, (first, last) in (HEALTHY | columns).items():
            level = first + share * (last - first)
            record[name] = float(level + noise * abs(level) * chance.randn())
        records.append(record)
    return records


def names(records) -> set[str]:
    return {alarm.name for alarm in history(records)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "columns",
    [
        {},
        dict(reward=(0.5, 0.5), grade=(0.5, 0.5)),
        dict(reward=(0.9, 0.3), grade=(0.9, 0.3)),
        dict(grade=(0.1, 0.55)),  # it gains less, and follows
        dict(response_length=(100, 400)),  # longer, and better
        dict(effective_answers=(2.0, 1.9)),  # a question with two answers
        dict(truncated=(0.5, 0.5)),
    ],
)
def test_no_false_alarm(columns, seed):
    assert history(series(seed=seed, **columns)) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (dict(grade=(0.2, 0.2)), "reward_gap"),
        (dict(grade=(0.3, 0.0)), "reward_gap"),
        (dict(reward=(0.5, 0.5), grade=(0.5, 0.5), response_length=(20, 60)), "length_runaway"),
        (dict(grade=(0.2, 0.2), response_length=(20, 60)), "length_runaway"),
        (dict(truncated=(0.05, 0.6)), "length_runaway"),
        (dict(effective_answers=(20, 1.05)), "answers_collapse"),
    ],
)
def test_what_is_gamed_is_named(columns, wanted, seed):
    assert wanted in names(series(seed=seed, **columns))


def test_what_rounding_makes_of_equal_rewards_is_no_gain():
    """Parts that are added up in another order: 0.9999999999999999, and later 1."""
    records = [record | {"reward_min": 1 - 2**-53, "reward_max": 1.0} for record in series(grade=(0.5, 0.5), noise=0)]
    for step, record in enumerate(records):
        record["reward"] = 1 - 2**-53 if step < STEPS // 2 else 1.0
    assert "reward_gap" not in names(records)


def test_the_scales_are_the_runs_own():
    """A reward of thousands against a grader of hundredths: the same alarm, and the same silence."""

    def scaled(records):
        for record in records:
            for name, factor in (("reward", 1e4), ("grade", 1e-2)):
                for each in (name, f"{name}_min", f"{name}_max"):
                    record[each] = factor * record[each] - 3
        return records

    assert names(scaled(series(grade=(0.2, 0.2)))) == {"reward_gap"} and names(scaled(series())) == set()


def test_a_grader_that_never_pays_does_not_follow():
    records = series(grade=(0.0, 0.0))
    for record in records:
        record["grade_max"] = 0.0
    assert "reward_gap" in names(records)


@pytest.mark.parametrize("gone", ["grade", "effective_answers", "response_length", "truncated"])
def test_what_was_not_recorded_is_not_looked_at(gone):
    records = series()
    for record in records[:3]:
        del record[gone]
    assert standing(records) == {}


def test_an_alarm_begins_and_ends():
    """A form is learnt first, which the grader does not pay for; then it follows."""
    form = series(noise=0.01, reward=(0.1, 0.5), grade=(0.0, 0.0), start=0.0)
    right = series(noise=0.01, reward=(0.5, 1.0), grade=(0.0, 1.0), start=0.0)
    records = [*form, *(record | {"step": STEPS + record["step"]} for record in right)]
    [alarm] = history(records)
    assert alarm.name == "reward_gap" and 2 * WINDOW <= alarm.first < STEPS < alarm.last < 2 * STEPS


def test_too_few_steps_say_nothing():
    assert history(series(steps=2 * WINDOW - 1, grade=(0.2, 0.2), start=0.0, noise=0.0)) == []
    assert history([]) == []


def test_the_effective_number_of_answers():
    from collections import Counter

    assert effective_number(Counter("aaaa")) == pytest.approx(1.0)
    assert effective_number(Counter("abcd" * 3)) == pytest.approx(4.0)
    assert effective_number(Counter("aab")) == pytest.approx(np.exp(-(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))))


def rollout(reward, grade, text="x") -> Rollout:
    columns = (np.zeros(2, np.int32), np.array([0, Provenance.MODEL], np.int8), np.zeros(2), np.zeros(2, np.int32))
    return Rollout("a", 0, *columns, [], "ok", reward=reward, grade=grade, text=text)


def test_a_steps_record_has_what_alarms_look_at():
    groups = [Group("a", [rollout(1.0, 0.5), rollout(0.0, None, "y"), rollout(0.5, -1.0)])]
    metrics = sampling_metrics(groups, 0)
    assert (metrics["reward_min"], metrics["reward_max"]) == (0.0, 1.0)
    assert (metrics["grade"], metrics["grade_min"], metrics["grade_max"]) == (-0.25, -1.0, 0.5)
    assert "grade" not in sampling_metrics([Group("a", [rollout(1.0, None)] * 2)], 0)


# a run


def write(root, records) -> None:
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_says_it_once_and_measures_it_at_every_step(tmp_path):
    said, events, records = [], [], series(grade=(0.2, 0.2))
    watch = AlarmWatch(
        tmp_path, log=said.append, record_event=lambda kind, **fields: events.append({"kind": kind, **fields})
    )
    metrics = [watch.update(record) for record in records]
    assert all(set(each) == {f"alarm_{name}" for name in NAMES} for each in metrics)
    [alarm] = history(records)
    raised = [number for number, each in enumerate(metrics, 1) if each["alarm_reward_gap"]]
    assert raised == list(range(alarm.first, STEPS + 1))
    [line], [event] = said, events
    assert f"step {alarm.first}: ALARM reward_gap: the reward went from" in line
    assert (event["kind"], event["name"], event["step"]) == ("alarm", "reward_gap", alarm.first)


def test_a_resumed_run_remembers_and_a_step_done_again_counts_once(tmp_path):
    records = series(grade=(0.2, 0.2))
    write(tmp_path, records[:40])
    watch = AlarmWatch(tmp_path, log=lambda text: None, record_event=lambda kind, **fields: None)
    again = [watch.update(record) for record in records[30:]]
    assert again[-1]["alarm_reward_gap"] == 1.0
    assert list(watch._records) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("columns", "code", "said"), [({}, 0, "no alarm"), (dict(grade=(0.2, 0.2)), 1, "ALARM")])
def test_the_command(tmp_path, capsys, columns, code, said):
    write(tmp_path, series(**columns))
    assert main(["hack-check", str(tmp_path)]) == code
    assert said in capsys.readouterr().out
    assert main(["hack-check", str(tmp_path), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == STEPS and told["unwatched"] == {}
    assert [alarm["name"] for alarm in told["alarms"]] == ["reward_gap"] * code
    assert all(alarm["stands"] for alarm in told["alarms"])


def test_the_command_says_what_it_could_not_watch(tmp_path, capsys):
    records = series()
    for record in records:
        del record["grade"]
    write(tmp_path, records)
    assert main(["hack-check", str(tmp_path)]) == 0
    assert "not watched: reward_gap, since the run has no eval.grader" in capsys.readouterr().out
    write(tmp_path, records[:5])
    assert main(["hack-check", str(tmp_path)]) == 0
    assert "it takes 20 steps to compare, and there are 5" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main(["hack-check", str(tmp_path)]) == 2
    assert "has no recorded step" in capsys.readouterr().err
    assert main(["hack-check", str(tmp_path / "nothing")]) == 2
    assert main(["hack-check", str(tmp_path), "--run.seed", "1"]) == 2


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["hack-check"], "it has no reward to be gamed"),
        (["trace"], "the seconds of each are in metrics.jsonl"),
        (["show"], "which samples no answers: there is none to show"),
        (["ledger"], "it has no ledger, and none is missing"),
        (["scale", "--generators", "2"], "which has no generators"),
    ],
)
def test_a_run_on_data_is_told_why_a_command_is_not_for_it(tmp_path, capsys, monkeypatch, command, said):
    monkeypatch.setattr(RunDir, "is_in_use", lambda self: True)
    write(tmp_path, [{"step": 1, "loss": 0.5}])
    for name, text in (("config.json", '{"data": {"file": "a.jsonl"}}'), ("ledger.db", "")):
        (tmp_path / name).write_text(text)
    assert main([command[0], str(tmp_path), *command[1:]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} is a run on data.file" in line and said in line


def test_a_long_run_s_history_takes_no_longer_than_its_last_steps(monkeypatch):
    """And of those it says what it says of each prefix by itself."""
    monkeypatch.setattr("titan_rl.records.alarms.alarms.HISTORY", STEPS)
    records = series(steps=STEPS, grade=(0.2, 0.2))
    before = [record | {"step": record["step"] - 500} for record in series(steps=500)]
    assert history([*before, *records]) == history(records) != []
    told = {alarm.first: alarm.says for alarm in history(records)}
    assert all(said in standing(records[:step]).values() for step, said in told.items())
