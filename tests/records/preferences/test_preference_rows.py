"""Rows that judgements become: majorities, labels, edits, and what the loaders of ``data.file`` make of them."""

import pytest

from titan_rl.config.sections.schema import DataConfig
from titan_rl.data.rows.datasets import read_files
from titan_rl.records.preferences.collection import Record, Settings
from titan_rl.records.preferences.items import Item
from titan_rl.records.preferences.judgements import Judgement
from titan_rl.records.preferences.rows import EDITS, LABELS, PREFERENCES, judged_items, majority, rows_of, write_rows
from titan_rl.records.preferences.summary import summary_of, table


def judged(choices: dict[str, str], **edits: str) -> list[Judgement]:
    """``choices``: by item, a letter for each person: a, b, t(ie), x (both bad), g(ood), n(ot good), u(nsure)."""
    names = {"a": "a", "b": "b", "t": "tie", "x": "both_bad", "g": "good", "n": "bad", "u": "unsure"}
    return [
        Judgement(f"id-{item}-{place}", item, f"person {place}", names[letter], (0, 1), edits.get(f"_{item}", ""))
        for item, letters in choices.items()
        for place, letter in enumerate(letters)
    ]


def latest(judgements):
    return judged_items({(each.item, each.who): each for each in judgements})


PAIRS = [Item(f"{n}?", (f"a{n}", f"b{n}"), f"line {n}", id=f"000{n}") for n in range(6)]
VOTES = {"0000": "aab", "0001": "b", "0002": "at", "0003": "ttx", "0004": "xxa"}


@pytest.mark.parametrize(
    "choices, expected",
    [("", None), ("a", "a"), ("ab", None), ("aab", "a"), ("abt", None), ("aabt", None), ("att", "t"), ("aabb", None)],
)
def test_a_majority_is_more_than_half_of_all(choices, expected):
    assert majority(list(choices)) == expected


def test_a_pair_is_the_majoritys_and_a_tie_is_none():
    rows = rows_of(PAIRS, latest(judged(VOTES)))[PREFERENCES]
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [("0?", "a0", "b0"), ("1?", "b1", "a1")]
    assert rows[0]["votes"] == {"chosen": 2, "rejected": 1} and rows[1]["votes"] == {"chosen": 1, "rejected": 0}


def test_labels_say_what_was_preferred_and_what_was_bad():
    rows = rows_of(PAIRS, latest(judged(VOTES)))[LABELS]
    assert [(row["completion"], row["label"]) for row in rows] == [
        *(("a0", True), ("b0", False), ("a1", False), ("b1", True)),
        *(("a4", False), ("b4", False)),
    ]


def test_planted_items_are_not_trained_on():
    planted = [Item("p?", ("good", "bad"), "planted", "a", id="0000")]
    assert not any(rows_of(planted, latest(judged({"0000": "aaa"}))).values())


def test_ratings_become_labels_and_edits_demonstrations():
    chat = [{"role": "user", "content": "q"}], ([{"role": "assistant", "content": "r"}],)
    items = [Item("0?", ("a0",), "x", id="0000"), Item(*chat, "x", id="0001"), Item("2?", ("a2",), "x", id="0002")]
    judgements = judged({"0000": "ggn", "0001": "nn", "0002": "gn"}, _0000="better", _0001="best", _0002="a2")
    rows = rows_of(items, latest(judgements))
    assert [(row["completion"], row["label"]) for row in rows[LABELS]] == [("a0", True), (chat[1][0], False)]
    assert [row["completion"] for row in rows[EDITS]] == ["better", [{"role": "assistant", "content": "best"}]]
    assert rows[EDITS][1]["prompt"] == chat[0] and not rows[PREFERENCES]


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_files_are_read_as_they_are(tmp_path, is_chat):
    def written(role: str, text: str):
        return [{"role": role, "content": text}] if is_chat else text

    items = [
        Item(
            written("user", f"{n}?"), (written("assistant", f"a{n}"), written("assistant", f"b{n}")), "x", id=f"000{n}"
        )
        for n in range(4)
    ]
    rows = rows_of(items, latest(judged({"0000": "a", "0001": "b", "0002": "x", "0003": "a"})))
    rated = [Item(item.prompt, item.answers[:1], "x", id=item.id) for item in items]
    rows[EDITS] = rows_of(rated, latest(judged({"0000": "g", "0001": "n"}, _0000="c", _0001="d")))[EDITS]
    assert write_rows(tmp_path, rows) == {PREFERENCES: 3, LABELS: 8, EDITS: 2}
    for name, kind, count in ((PREFERENCES, "pairs", 3), (LABELS, "labels", 8), (EDITS, "demonstrations", 2)):
        read = read_files(DataConfig(file=str(tmp_path / name)), kind, [])
        assert len(read.train) + len(read.held_out) == count
    answers = {row.answers[0] if not is_chat else row.answers[0][0]["content"] for row in read.train + read.held_out}
    assert answers == {"c", "d"}


def test_a_file_of_an_earlier_majority_goes(tmp_path):
    write_rows(tmp_path, rows_of(PAIRS, latest(judged({"0000": "a"}))))
    assert (tmp_path / PREFERENCES).exists()
    assert write_rows(tmp_path, rows_of(PAIRS, latest(judged({"0000": "ab"})))) == {}
    assert not (tmp_path / PREFERENCES).exists()


def test_the_summary_by_hand():
    """Five pairs as above, and a planted one that the first person gets right and the second does not."""
    planted = Item("p?", ("good", "bad"), "planted", "a", id="0005")
    record = Record(Settings("pairs", 1, 2, {}), [*PAIRS[:5], planted], judged(VOTES | {"0005": "at"}))
    summary = summary_of(record)
    assert (summary.items, summary.planted, summary.judgements, summary.complete) == (5, 1, 12, 4)
    assert summary.decided == {"preferred": 2, "ties": 1, "both bad": 1, "no majority": 1}
    # units aab, at, ttx, xxa: n = 11, n_a = 4, n_b = 1, n_t = 3, n_x = 3; observed 4/2 + 2 + 4/2 + 4/2 = 8
    assert summary.alpha == pytest.approx(1 - 8 * 10 / (121 - 16 - 1 - 9 - 9)) and summary.alpha_items == 4
    people = {each.name: each for each in summary.labellers}
    assert str(people["person 0"].planted.correct) == "1" and people["person 1"].planted.correct == 0
    assert people["person 2"].planted is None and people["person 0"].judgements == 6
    lines = table(summary).splitlines()
    assert any(line.split() == ["ties", "1", "by", "majority"] for line in lines)
    assert any(line.startswith("person 0") and "1 of 1" in line for line in lines)
