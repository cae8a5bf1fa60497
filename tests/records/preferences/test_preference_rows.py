"""Rows that judgements become: majorities, labels, edits, and what the loaders of ``data.file`` make of them."""

from dataclasses import replace

import pytest

from titan_rl.config.sections.schema import DataConfig
from titan_rl.data.rows.datasets import read_files
from titan_rl.records.preferences.collection import Collection, Record, Settings, create, read_collection
from titan_rl.records.preferences.items import Item, shuffled
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


CALL = {"type": "function", "function": {"name": "find", "arguments": {"q": 1}}}


@pytest.mark.parametrize(
    "answer, edit, expected",
    [
        (
            [
                {"role": "assistant", "content": "let me look", "tool_calls": [CALL]},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "It is 42."},
            ],
            "It is 43.",
            "It is 43.",
        ),
        ([{"role": "assistant", "content": "It is 42", "reasoning_content": "hm hm"}], "It is 43", "It is 43"),
        ([{"role": "assistant", "content": "It is 42", "reasoning_content": "hm hm"}], "It is 42", None),  # as it was
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], "I do not know", None),
    ],
)
def test_an_edit_is_of_the_last_messages_content_alone(answer, edit, expected):
    item = Item([{"role": "user", "content": "q"}], (answer,), "x", id="0000")
    rows = rows_of([item], latest(judged({"0000": "n"}, _0000=edit)))[EDITS]
    assert item.editable == (None if "tool_calls" in answer[-1] else answer[-1]["content"])
    assert [row["completion"] for row in rows] == (
        [] if expected is None else [[*answer[:-1], answer[-1] | {"content": expected}]]
    )


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


def alpha(folder, pairs) -> float | None:
    """Of two people who agree on 95 of 100 pairs, and whose other judgements are opposite."""
    items = shuffled(pairs, 3)
    create(folder, Settings("pairs", 3, 2, {}), items)
    opened = Collection(folder)
    for who in ("Ann", "Bob"):
        while assigned := opened.next_item(who):
            number, texts = int(assigned.item.prompt), [assigned.item.answers[place] for place in assigned.shown]
            is_first = texts[0].startswith("good") != (who == "Bob" and number % 20 == 0)
            choice = "first" if is_first else "second"
            opened.judge(Judgement(f"{who}-{number:06d}", assigned.item.id, who, choice, ()))
    opened.close()
    return summary_of(read_collection(folder)).alpha


def test_alpha_does_not_hang_on_which_answer_a_file_writes_first(tmp_path):
    """A file with the better answer always first, and the same file with all answers the other way round."""
    better_first = [Item(f"{n}", (f"good {n}", f"poor {n}"), "x") for n in range(100)]
    better_last = [replace(item, answers=item.answers[::-1]) for item in better_first]
    found = [alpha(tmp_path / str(number), items) for number, items in enumerate((better_first, better_last))]
    assert found == [pytest.approx(0.9, abs=0.02)] * 2


def test_a_planted_pair_that_is_turned_keeps_its_better_answer():
    items = shuffled([Item(f"{n}", ("good", "poor"), "x", "a") for n in range(40)], 3)
    assert {item.answers["ab".index(item.planted)] for item in items} == {"good"}
    assert len({item.answers for item in items}) == 2


def test_the_summary_by_hand():
    """Five pairs as above, and a planted one that the first person gets right and the second does not."""
    planted = Item("p?", ("good", "bad"), "planted", "a", id="0005")
    judgements = judged(VOTES | {"0005": "at"})
    seconds = iter([5, 1, 8, 1, 3, 2])
    judgements = [replace(each, seconds=next(seconds)) if each.who == "person 0" else each for each in judgements]
    record = Record(Settings("pairs", 1, 2, {}), [*PAIRS[:5], planted], judgements)
    summary = summary_of(record)
    assert (summary.items, summary.planted, summary.judgements, summary.complete) == (5, 1, 12, 4)
    assert summary.decided == {"preferred": 2, "ties": 1, "both bad": 1, "no majority": 1}
    # units aab, at, ttx, xxa: n = 11, n_a = 4, n_b = 1, n_t = 3, n_x = 3; observed 4/2 + 2 + 4/2 + 4/2 = 8
    assert summary.alpha == pytest.approx(1 - 8 * 10 / (121 - 16 - 1 - 9 - 9)) and summary.alpha_items == 4
    people = {each.name: each for each in summary.labellers}
    assert str(people["person 0"].planted.correct) == "1" and people["person 1"].planted.correct == 0
    assert people["person 2"].planted is None and people["person 0"].judgements == 6
    assert people["person 0"].seconds == 3.0, "the median of 1, 1, 2, 3, 5, 8 is its upper one"
    # a always stands first: it was chosen twice of 0000, and once of 0002, 0004 and 0005; b once of 0000 and of 0001
    assert (summary.first_chosen.correct, summary.first_chosen.count) == (5, 7)
    lines = table(summary).splitlines()
    assert any(line.split() == ["ties", "1", "by", "majority"] for line in lines)
    assert any(line.startswith("person 0") and "1 of 1" in line for line in lines)
