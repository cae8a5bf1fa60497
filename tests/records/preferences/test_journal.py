"""Journal of judgements: on disk before it returns, whole after a crash, damage named; and who is asked what."""

import json
import os
from collections import Counter

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.records.preferences import collection as collections
from titan_rl.records.preferences import items as items_module
from titan_rl.records.preferences import journal as journals
from titan_rl.records.preferences.collection import (
    MOST_CHANGES,
    Collection,
    Settings,
    create,
    read_collection,
)
from titan_rl.records.preferences.items import CHOICES, Item, read_items, shuffled
from titan_rl.records.preferences.journal import Journal, latest, read_journal
from titan_rl.records.preferences.judgements import Judgement, RefusedJudgement, judgement_of, name_of, order_of

PAIRS = CHOICES["pairs"]


def judgement(number: int, item: str = "0000", who: str = "Ann", choice: str = "first", **fields) -> Judgement:
    return Judgement(f"id-{number:06d}", item, who, choice, (), **fields)


def collection(folder, num_items: int = 6, wanted: int = 2, num_planted: int = 0) -> Collection:
    items = [Item(f"{n}+1=", (f"right {n}", f"wrong {n}"), f"line {n}") for n in range(num_items)]
    planted = [Item(f"{n}*1=", (f"{n}", "no"), f"planted {n}", "a") for n in range(num_planted)]
    create(folder, Settings("pairs", 7, wanted, {}), shuffled([*items, *planted], 7))
    return Collection(folder)


# the journal


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "judgements.jsonl", PAIRS)
    for number in range(3):
        journal.append(judgement(number, choice="a", edit="é\n"))
    journal.close()
    return tmp_path / "judgements.jsonl"


def test_a_torn_last_line_is_cut_at_every_byte_and_all_before_it_stay(path):
    """Killed at any moment of the last write: what was there before is there, and what comes next is whole."""
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(path, PAIRS)
        kept = [each.id for each in journal.judgements]
        assert kept == [f"id-{number:06d}" for number in range(3 if end == len(whole) - 1 else 2)]
        journal.append(judgement(9, choice="tie"))
        journal.close()
        assert [each.id for each in read_journal(path, PAIRS)] == [*kept, "id-000009"]


def test_a_last_line_that_is_whole_and_no_judgement_is_refused(path):
    """Written by another hand, or of another mode: only half a line is cut off."""
    path.write_bytes(path.read_bytes() + json.dumps(GOOD | {"choice": "good"}).encode())
    with pytest.raises(ConfigError, match="line 4 is no judgement"):
        Journal(path, PAIRS)


@pytest.mark.parametrize("change", [lambda data: data + b"{}\n", lambda data: data[:-9]])
def test_what_something_else_writes_meanwhile_is_neither_cut_nor_filled(path, change):
    journal = Journal(path, PAIRS)
    changed = change(path.read_bytes())
    path.write_bytes(changed)
    with pytest.raises(RefusedJudgement, match="something else changed"):
        journal.append(judgement(9, choice="a"))
    journal.close()
    assert path.read_bytes() == changed and len(journal.judgements) == 3


def test_a_reader_passes_a_line_over_that_is_being_written(path):
    with open(path, "ab") as file:
        file.write(b'{"id": "id-0')
    assert len(read_journal(path, PAIRS)) == 3 and path.read_bytes().endswith(b"id-0")


@pytest.mark.parametrize("damage", [b"{}\n", b"\0\0\0\n", b'{"id": "id-000000"\n', b"[" * 3000 + b"\n"])
def test_damage_before_the_end_is_refused_by_its_line(path, damage):
    path.write_bytes(path.read_bytes() + damage + path.read_bytes())
    with pytest.raises(ConfigError, match="line 4 is no judgement") as caught:
        Journal(path, PAIRS)
    assert "\n" not in str(caught.value)


def test_it_is_synced_before_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal = Journal(path, PAIRS)
    journal.append(judgement(9, choice="a"))
    assert synced[-1] == path.stat().st_size == journal._size
    journal.close()


def test_a_write_that_fails_leaves_no_half_line_behind(path, monkeypatch):
    before = path.read_bytes()
    journal = Journal(path, PAIRS)

    def half(descriptor, data):
        os.write(descriptor, data[:5])
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(journals, "_write_all", half)
        with pytest.raises(OSError, match="Input/output"):
            journal.append(judgement(9, choice="b"))
    assert len(journal.judgements) == 3 and path.read_bytes() == before
    journal.append(judgement(9, choice="b"))
    journal.close()
    assert [each.id for each in read_journal(path, PAIRS)][3:] == ["id-000009"]


def test_a_journal_that_is_a_link_or_a_pipe_is_refused(tmp_path, path):
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        Journal(tmp_path / "link", PAIRS)
    with pytest.raises(ConfigError, match="pipe"):
        Journal(tmp_path / "pipe", PAIRS)


# who is asked what


def judge_all(opened: Collection, who: str, most: int = 10_000) -> list[Item]:
    """Items that a labeller was asked, in order."""
    asked = []
    while len(asked) < most and (assigned := opened.next_item(who)):
        opened.judge(Judgement(f"id-{who}-{assigned.item.id}", assigned.item.id, who, "first", ()))
        asked.append(assigned.item)
    return asked


def test_each_is_asked_of_as_many_as_wanted(tmp_path):
    opened = collection(tmp_path / "c", num_items=6, wanted=2, num_planted=2)
    counts = Counter(item.id for who in ("Ann", "Bob", "Cy") for item in judge_all(opened, who))
    assert len(counts) == 8 and set(counts.values()) == {2}, "nobody is asked planted ones alone"


def test_planted_items_are_asked_in_proportion_and_all_over_the_place(tmp_path):
    """Whoever comes when little is open, or nothing, is asked few of them, or none."""
    opened = collection(tmp_path / "c", num_items=200, wanted=1, num_planted=20)
    ann = [bool(item.planted) for item in judge_all(opened, "Ann", 110)]
    assert 4 <= sum(ann) <= 16 and opened.progress("Bob") == (0, (left := 90 + sum(ann)) + -(-left // 10))
    ann += [bool(item.planted) for item in judge_all(opened, "Ann", 99)]
    bob = [bool(item.planted) for item in judge_all(opened, "Bob")]
    assert 0 < bob.count(False) < 20 and bob.count(True) <= -(-bob.count(False) // 10)
    assert opened.progress("Cy") == (0, 0)
    places = [number for number, is_planted in enumerate(ann) if is_planted]
    assert min(places) < 40 and max(places) > 170 and 100 in range(places[4], places[-4])


def test_planted_items_have_numbers_among_the_others(tmp_path):
    numbers = [int(item.id) for item in collection(tmp_path / "c", 80, num_planted=20).items.values() if item.planted]
    assert len(numbers) == 20 and min(numbers) < 25 and max(numbers) > 75


def test_each_person_has_an_order_of_their_own(tmp_path):
    orders = [
        [item.id for item in judge_all(collection(tmp_path / f"{who}{number}", 40), who)]
        for number, who in enumerate(("Ann", "Ann", "Bob"))
    ]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != sorted(orders[0]) and orders[2] != sorted(orders[2])


def test_bounds_of_a_collection(tmp_path, monkeypatch):
    opened = collection(tmp_path / "c", wanted=9)
    monkeypatch.setattr(collections, "MOST_LABELLERS", 2)
    for number, who in enumerate(("Ann", "Bob")):
        opened.judge(judgement(number, who=who))
    with pytest.raises(RefusedJudgement, match="2 labellers have judged already"):
        opened.judge(judgement(7, who="Cy"))
    opened.judge(judgement(8, "0001", who="ANN"))
    monkeypatch.setattr(items_module, "MOST_ITEMS", 5)
    with pytest.raises(ConfigError, match="more than 5: give --count"):
        shuffled(list(opened.items.values()), 1)
    with pytest.raises(ConfigError, match="line 6: one item too many"):
        read_items(tmp_path / "c" / "items.jsonl", "pairs")


def test_one_number_twice_is_damage(tmp_path):
    collection(tmp_path / "c").close()
    path = tmp_path / "c" / "items.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    with pytest.raises(ConfigError, match="line 7: one item too many"):
        read_collection(tmp_path / "c")


def test_a_restart_goes_on_where_it_stopped(tmp_path):
    opened = collection(tmp_path / "c")
    for number in range(3):
        opened.judge(judgement(number, opened.next_item("Ann").item.id))
    expected = opened.next_item("Ann"), opened.progress("Ann")
    opened.close()
    again = Collection(tmp_path / "c")
    assert (again.next_item("Ann"), again.progress("Ann")) == expected and expected[1] == (3, 3)


def test_one_process_serves_a_collection(tmp_path):
    opened = collection(tmp_path / "c")
    with pytest.raises(ConfigError, match="another process"):
        Collection(tmp_path / "c")
    opened.close()
    Collection(tmp_path / "c").close()


def test_the_same_judgement_sent_twice_counts_once_and_a_later_one_takes_its_place(tmp_path):
    opened = collection(tmp_path / "c")
    journal = tmp_path / "c" / "judgements.jsonl"
    for repeated in (judgement(1), judgement(1)):
        opened.judge(repeated)
    assert len(journal.read_text().splitlines()) == 1 and opened.progress("Ann")[0] == 1
    opened.judge(judgement(3, choice="tie"))
    opened.judge(judgement(1))  # an old one, late
    assert opened.progress("Ann")[0] == 1
    record = read_collection(tmp_path / "c")
    assert [each.choice for each in record.judgements][-1] == "tie" and len(record.judgements) == 2
    with pytest.raises(RefusedJudgement, match="another judgement"):
        opened.judge(judgement(1, choice="second"))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_reply_that_was_lost_overrides_nothing_newer(tmp_path, is_restarted):
    """The second judgement repeats the first, and is sent again when a third one has taken their place."""
    opened = collection(tmp_path / "c")
    for number, choice in ((1, "first"), (2, "first"), (3, "tie")):
        opened.judge(judgement(number, choice=choice))
    if is_restarted:
        opened.close()
        opened = Collection(tmp_path / "c")
    opened.judge(judgement(2))
    assert latest(read_collection(tmp_path / "c").judgements)["0000", "Ann"].choice == "tie"


def test_another_edit_with_the_same_rating_is_another_judgement(tmp_path):
    create(tmp_path / "c", Settings("ratings", 7, 1, {}), shuffled([Item("q", ("r",), "x")], 7))
    opened = Collection(tmp_path / "c")
    opened.judge(judgement(1, choice="good", edit="better"))
    opened.judge(judgement(2, choice="good", edit="best"))
    assert [each.edit for each in read_collection(tmp_path / "c").judgements] == ["better", "best"]
    with pytest.raises(RefusedJudgement, match="another judgement"):
        opened.judge(judgement(2, choice="good", edit="other"))


def test_an_edit_of_what_cannot_be_edited_is_refused(tmp_path):
    with pytest.raises(RefusedJudgement, match="no answer to edit"):
        collection(tmp_path / "c").judge(judgement(1, choice="tie", edit="zz"))


def test_a_name_in_other_letters_is_the_same_person(tmp_path):
    opened = collection(tmp_path / "c")
    assert opened.spelling("ann") == ("ann", False)
    opened.judge(judgement(1, who="Ann"))
    opened.judge(judgement(2, who="ANN", choice="tie"))
    assert opened.spelling("ann") == ("Ann", True) and opened.progress("Ann")[0] == 1
    opened.close()
    assert Collection(tmp_path / "c").spelling("aNN") == ("Ann", True)
    assert {each.who for each in read_collection(tmp_path / "c").judgements} == {"Ann"}
    assert name_of("Ａnn") == "Ann", "full-width letters"
    with pytest.raises(RefusedJudgement):
        name_of("Ann" + " " * 250 + "Bob")


def test_what_is_shown_first_is_undone_in_the_record(tmp_path):
    opened = collection(tmp_path / "c", num_items=40)
    for number in range(40):
        asked = opened.next_item("Ann")
        first = asked.item.answers[asked.shown[0]]
        own = opened.judge(judgement(number, asked.item.id, choice="first" if first.startswith("right") else "second"))
        assert asked.item.answers["ab".index(own.choice)].startswith("right") and own.shown == asked.shown
    orders = Counter(each.shown for each in read_collection(tmp_path / "c").judgements)
    assert min(orders[0, 1], orders[1, 0]) > 8, "either order comes up"


def test_the_order_is_by_seed_item_and_person():
    orders = {
        (seed, who): [order_of(seed, f"{n:04d}", who, "pairs") for n in range(64)] for seed in (1, 2) for who in "ab"
    }
    assert len({tuple(each) for each in orders.values()}) == 4
    assert orders[1, "a"] == [order_of(1, f"{n:04d}", "a", "pairs") for n in range(64)]


def test_changes_of_mind_are_bounded(tmp_path):
    opened = collection(tmp_path / "c")
    for number in range(MOST_CHANGES):
        opened.judge(judgement(number, choice=("first", "second")[number % 2]))
    with pytest.raises(RefusedJudgement, match="was judged"):
        opened.judge(judgement(99, choice="tie"))


# what anybody may have written

GOOD = {"id": "k3Jx_-90", "item": "0000", "who": "Ann", "choice": "a", "shown": [1, 0], "seconds": 1.5, "time": 1e9}


def test_a_judgement_is_read_as_it_was_written():
    assert judgement_of(GOOD, PAIRS).as_dict() == GOOD
    assert judgement_of(GOOD | {"who": "  Zoë \t van  d'Hert "}, PAIRS).who == "Zoë van d'Hert"


@pytest.mark.parametrize(
    "field, value",
    [
        *(("id", value) for value in ("short", "x" * 65, "a/b/c/d/e", 7, None)),
        *(("item", value) for value in ("../x", "7", "0" * 9, ["0000"])),
        *(("who", value) for value in ("", " ", "<b>x</b>", "a" * 41, "\x1b[2J", "a\u202eb", "-x", 3, None)),
        *(("choice", value) for value in ("first", "good", "", None, ["a"])),
        *(("shown", value) for value in ([0, 0], [1], [True, False], "01", [0, 1, 2])),
        *(("edit", value) for value in ("\ud800", "x" * 200_001, 5, None)),
        *(("seconds", value) for value in (-1, 1e9, float("nan"), float("inf"), "1", True)),
    ],
)
def test_what_is_no_judgement_is_refused_in_one_line(field, value):
    with pytest.raises(RefusedJudgement) as caught:
        judgement_of(GOOD | {field: value}, PAIRS)
    assert field in str(caught.value) or "name" in str(caught.value)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("collection.json", "[]", "no collection"),
        ("collection.json", json.dumps({"mode": "x", "seed": 1, "wanted": 1, "source": {}}), "no settings"),
        ("collection.json", json.dumps({"mode": "pairs", "seed": 1, "wanted": 0, "source": {}}), "no settings"),
        ("items.jsonl", "{}\n", "line 1 is no item"),
        ("items.jsonl", '{"id": "0000", "source": "x", "answers": ["a"], "prompt": "b"}\n', "list of two"),
        ("items.jsonl", "", "has not: restore"),
    ],
)
def test_a_forged_collection_is_one_line(tmp_path, name, text, said):
    opened = collection(tmp_path / "c")
    opened.judge(judgement(1))
    opened.close()
    (tmp_path / "c" / name).write_text(text)
    for read in (read_collection, Collection):
        with pytest.raises(ConfigError, match=said) as caught:
            read(tmp_path / "c")
        assert "\n" not in str(caught.value)
