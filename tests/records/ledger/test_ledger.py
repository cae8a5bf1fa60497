"""Every sample ends trained, discarded for a reason, or pending, whatever happens to the process."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from titan_rl.algorithms.batches.batching import sample_outcomes
from titan_rl.cli import main
from titan_rl.config.sections.schema import AlgorithmConfig
from titan_rl.data.types import Group, Rollout
from titan_rl.records.ledger.audit import flaws
from titan_rl.records.ledger.ledger import Ledger, LedgerError

TRAINED = [None, None]


@pytest.fixture
def ledger(tmp_path):
    """Six prompts of two samples."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.issue(list("abcdef"), 2)
    yield ledger
    ledger.close()


def outcomes_of(ledger) -> dict[tuple[str, int], tuple]:
    rows = sqlite3.connect(ledger.path).execute("select prompt_id, sample, state, step, reason from samples")
    return {(prompt_id, sample): tuple(rest) for prompt_id, sample, *rest in rows}


def test_account_adds_up(ledger):
    ledger.settle({"a": TRAINED, "b": [None, "timeout"]}, 1)
    ledger.settle({"c": ["timeout", "no_peers"]})
    ledger.settle({"d": ["prompt_too_long"] * 2})
    assert ledger.account() == {
        "issued": 12,
        "trained": 3,
        "pending": 4,
        "discarded (timeout)": 2,
        "discarded (no_peers)": 1,
        "discarded (prompt_too_long)": 2,
    }
    ledger.check(4)
    ledger.verify()


def test_each_sample_of_a_batch_has_its_own_outcome(ledger):
    ledger.settle({"b": [None, "timeout"]}, 7)
    assert outcomes_of(ledger)["b", 0] == ("trained", 7, None)
    assert outcomes_of(ledger)["b", 1] == ("discarded", 7, "timeout")


def test_empty_account(tmp_path):
    assert Ledger(tmp_path / "ledger.db").account() == {"issued": 0, "trained": 0, "pending": 0}


def test_prompt_is_issued_once_and_the_others_of_its_batch_with_it(ledger):
    with pytest.raises(sqlite3.IntegrityError):
        ledger.issue(["g", "a"], 2)
    assert ledger.account()["issued"] == 12
    ledger.check(12)


@pytest.mark.parametrize("name", ["a", "b", "unknown"])
@pytest.mark.parametrize("outcome", [TRAINED, ["timeout"] * 2])
def test_an_outcome_is_settled_once_and_a_batch_completely_or_not_at_all(ledger, name, outcome):
    ledger.settle({"a": TRAINED}, 1)
    ledger.settle({"b": ["timeout"] * 2})
    before = outcomes_of(ledger)
    with pytest.raises(LedgerError, match=name):
        ledger.settle({"c": TRAINED, name: outcome}, 2)
    assert outcomes_of(ledger) == before
    ledger.settle({"c": TRAINED}, 2)
    ledger.verify()


@pytest.mark.parametrize("outcomes", [[None], [None] * 3])
def test_a_prompt_is_settled_with_all_its_samples(ledger, outcomes):
    with pytest.raises(LedgerError, match="a has 2"):
        ledger.settle({"a": outcomes}, 1)


@pytest.mark.parametrize("outcomes", [TRAINED, ["timeout"] * 2])
@pytest.mark.parametrize(
    "change",
    [
        "state = 'trained', step = 2, reason = null",
        "state = 'discarded', step = null, reason = 'x'",
        "state = 'discarded', reason = 'x'",
    ],
)
def test_the_database_itself_refuses_to_settle_twice(ledger, outcomes, change):
    ledger.settle({"a": outcomes}, 1)
    other = sqlite3.connect(ledger.path)
    with pytest.raises(sqlite3.IntegrityError, match="settled"):
        other.execute(f"update samples set {change} where prompt_id = 'a'")


@pytest.mark.parametrize(
    "row", ["'trained', null, null", "'pending', 1, null", "'discarded', 1, null", "'lost', 1, 'x'"]
)
def test_the_database_itself_refuses_an_outcome_that_makes_no_sense(ledger, row):
    with pytest.raises(sqlite3.IntegrityError):
        sqlite3.connect(ledger.path).execute(f"insert into samples values ('a', 9, {row})")


@pytest.mark.parametrize(
    "change", ["delete from samples where prompt_id = 'f'", "insert into samples (prompt_id, sample) values ('a', 2)"]
)
def test_a_violated_account_is_a_fault(ledger, change):
    ledger.check(12)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute(change)
    for look in (ledger.verify, lambda: ledger.check(12)):
        with pytest.raises(LedgerError):
            look()


def test_a_prompt_that_the_loop_forgot_is_a_fault(ledger):
    with pytest.raises(LedgerError, match="10 are in progress"):
        ledger.check(10)


def test_rewind_makes_later_steps_pending_again(ledger):
    ledger.settle({"b": TRAINED, "a": TRAINED}, 1)
    ledger.settle({"d": [None, "timeout"]}, 2)
    ledger.settle({"c": TRAINED}, 3)
    ledger.settle({"e": ["timeout"] * 2})
    assert ledger.rewind(1, 2) == ["c", "d", "f"]
    assert ledger.account() == {"issued": 12, "trained": 4, "pending": 6, "discarded (timeout)": 2}
    ledger.check(6)
    ledger.settle({"d": TRAINED, "c": TRAINED}, 2)
    assert ledger.rewind(2, 2) == ["f"]


def test_rewind_for_groups_of_another_size(ledger):
    ledger.settle({"a": TRAINED}, 1)
    for num_samples in (4, 3):
        assert ledger.rewind(1, num_samples) == list("bcdef")
        assert ledger.account() == {"issued": 2 + 5 * num_samples, "trained": 2, "pending": 5 * num_samples}
    ledger.settle({"b": [None] * 3}, 2)
    ledger.verify()


def test_rewind_is_complete_or_not_at_all(ledger):
    ledger.settle({"a": TRAINED, "b": TRAINED}, 2)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute(
        "create trigger broken before update on samples when old.prompt_id = 'b' "
        "begin select raise(abort, 'disk trouble'); end"
    )
    with pytest.raises(sqlite3.IntegrityError, match="disk trouble"):
        ledger.rewind(1, 2)
    assert ledger.account()["trained"] == 4
    ledger.check(8)


def test_a_prompt_that_is_held_out_has_no_account(ledger):
    ledger.count_retry("held_out/0000001")
    assert flaws(ledger.path) == [] and ledger.account()["issued"] == 12


def test_another_process_reads_what_was_written_without_a_close(ledger, tmp_path):
    ledger.settle({"a": TRAINED}, 1)
    assert Ledger(tmp_path / "ledger.db").account() == {"issued": 12, "trained": 2, "pending": 10}


_WRITER = """
import sys
from pathlib import Path
from titan_rl.records.ledger.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for step in range(1, 100_000):
    names = [f"{step:06d}/{place}" for place in range(4)]
    ledger.issue(names, 3)
    ledger.settle({names[0]: [None, None, "timeout"], names[1]: [None] * 3}, step)
    ledger.settle({names[2]: ["infra_error"] * 3})
    print(step, flush=True)
"""


def test_killed_at_any_moment_it_is_proved_and_keeps_what_it_said(tmp_path):
    moment = random.Random(1)
    for attempt in range(3):
        path = tmp_path / f"{attempt}.db"
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        assert flaws(path) == [], "of a run that goes on"
        time.sleep(moment.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        last = int(["1", *process.stdout.read().split()][-1])
        process.wait()
        process.stdout.close()
        assert flaws(path) == []
        ledger = Ledger(path)
        ledger.verify()
        account = ledger.account()
        assert account["issued"] == sum(count for name, count in account.items() if name != "issued")
        assert account["trained"] in (5 * last, 5 * last + 5)
        by_step = dict(ledger._connection.execute("select step, count(*) from samples where step > 0 group by step"))
        assert set(by_step.values()) == {6}
        ledger.close()


def rollout(sample: int, status: str) -> Rollout:
    return Rollout("p", sample, None, np.ones(1, np.int8), None, None, turns=[], status=status)


@pytest.mark.parametrize(
    ("statuses", "outcomes"),
    [
        (["ok", "truncated", "timeout"], [None, None, "timeout"]),
        (["ok", "timeout", "infra_error"], ["no_peers", "timeout", "infra_error"]),
        (["infra_error"] * 3, ["infra_error"] * 3),
    ],
)
def test_outcomes_of_a_group(statuses, outcomes):
    """A failure of the machinery is discarded by name; what is alone in its group has nothing to compare with."""
    group = Group("p", [rollout(sample, status) for sample, status in enumerate(statuses)][::-1])
    assert sample_outcomes(group, AlgorithmConfig(), 3) == outcomes


def test_outcomes_of_a_refused_group_and_of_truncated_samples():
    assert sample_outcomes(Group("p", [], refused="prompt_too_long"), AlgorithmConfig(), 2) == ["prompt_too_long"] * 2
    group = Group("p", [rollout(sample, status) for sample, status in enumerate(["ok", "truncated", "ok"])])
    assert sample_outcomes(group, AlgorithmConfig(train_truncated=False), 3) == [None, "truncated", None]


def test_the_command_prints_the_account(ledger, tmp_path, capsys):
    ledger.settle({"a": TRAINED, "b": [None, "timeout"]}, 1)
    ledger.settle({"c": ["infra_error"] * 2})
    ledger.count_retry("c")
    ledger.count_retry("c")
    assert main(["ledger", str(tmp_path), "--json", "--steps"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(tmp_path),
        "prompts": 6,
        "issued": 12,
        "trained": 3,
        "pending": 6,
        "discarded": {"infra_error": 2, "timeout": 1},
        "is_chained": True,
        "flaws": [],
        "adds_up": True,
        "retries": 2,
        "prompts_by_retries": {"2": 1},
        "steps": [{"step": 1, "prompts": 2, "trained": 3, "discarded": {"timeout": 1}}],
    }
    assert main(["ledger", str(tmp_path), "--steps"]) == 0
    said = capsys.readouterr().out
    for line in ("discarded: timeout", "pending", "adds up", "1 prompt 2 times", "1 timeout"):
        assert line in said


def test_wrong_runs_are_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "ledger.db").write_text("this is no database, whatever its name says")
    for name in ("nowhere", "torn"):
        assert main(["ledger", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("titan-rl: ") and "ledger" in said and "\n" not in said
