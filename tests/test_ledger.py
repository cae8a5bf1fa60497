"""Every prompt ends trained, discarded for a reason, or pending, whatever happens to the process."""

import sqlite3

import pytest

from titan_rl.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    for name in "abcdef":
        ledger.issue(name)
    yield ledger
    ledger.close()


def test_account_adds_up(ledger):
    ledger.train(["a", "b"], 1)
    ledger.discard("c", "timeout")
    ledger.discard("d", "timeout")
    ledger.discard("e", "prompt_too_long")
    assert ledger.account() == {
        "issued": 6,
        "trained": 2,
        "pending": 1,
        "discarded (timeout)": 2,
        "discarded (prompt_too_long)": 1,
    }


def test_empty_account(tmp_path):
    assert Ledger(tmp_path / "ledger.db").account() == {"issued": 0, "trained": 0, "pending": 0}


def test_prompt_is_issued_once(ledger):
    with pytest.raises(sqlite3.IntegrityError):
        ledger.issue("a")


@pytest.mark.parametrize("name", ["a", "b", "unknown"])
def test_fate_is_settled_once(ledger, name):
    ledger.train(["a"], 1)
    ledger.discard("b", "timeout")
    with pytest.raises(AssertionError, match=name):
        ledger.train([name], 2)


def test_batch_is_trained_whole_or_not_at_all(ledger, tmp_path):
    ledger.train(["a"], 1)
    with pytest.raises(AssertionError):
        ledger.train(["b", "a"], 2)
    assert Ledger(tmp_path / "ledger.db").account()["trained"] == 1
    ledger.train(["b"], 2)
    assert Ledger(tmp_path / "ledger.db").account()["trained"] == 2


def test_rewind_makes_later_steps_pending_again(ledger):
    ledger.train(["b", "a"], 1)
    ledger.train(["d"], 2)
    ledger.train(["c"], 3)
    ledger.discard("e", "timeout")
    assert ledger.rewind(1) == ["c", "d", "f"]
    assert ledger.account() == {"issued": 6, "trained": 2, "pending": 3, "discarded (timeout)": 1}
    ledger.train(["d", "c"], 2)
    assert ledger.rewind(2) == ["f"]


def test_another_process_reads_what_was_written_without_a_close(ledger, tmp_path):
    ledger.train(["a"], 1)
    assert Ledger(tmp_path / "ledger.db").account() == {"issued": 6, "trained": 1, "pending": 5}
