"""Journal of judgements: on disk before it returns, whole after a crash, damage named; and who is asked what."""

import json
import os
from collections import Counter

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.records.preferences import journal as journals
from titan_rl.records.preferences.collection import (
    MOST_CHANGES,
    Collection,
    Settings,
    create,
    read_collection,
)
from titan_rl.records.preferences.items import CHOICES, Item, shuffled
from titan_rl.records.preferences.journal import Journal, read_journal
from titan_rl.records.preferences.judgements import Judgement, RefusedJudgement, judgement_of, order_of

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
    assert len(journal.judgements) == 3 and path.read_bytes() != before
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


def test_each_is_asked_of_as_many_as_wanted_and_planted_ones_of_everybody(tmp_path):
    opened = collection(tmp_path / "c", num_items=6, wanted=2, num_planted=2)
    counts, number = Counter(), 0
    for who in ("Ann", "Bob", "Cy"):
        while asked := opened.next_item(who):
            number += 1
            opened.judge(judgement(number, asked.item.id, who))
            counts[asked.item.planted, asked.item.id] += 1
    assert sorted(counts.values()) == [2] * 6 + [3] * 2
    assert all((count == 3) == (planted == "a") for (planted, _), count in counts.items())


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
    opened.judge(judgement(1))
    for repeated in (judgement(1), judgement(2)):  # sent again; pressed again
        opened.judge(repeated)
    assert len(journal.read_text().splitlines()) == 1 and opened.progress("Ann")[0] == 1
    opened.judge(judgement(3, choice="tie"))
    opened.judge(judgement(1))  # an old one, late
    assert opened.progress("Ann")[0] == 1
    record = read_collection(tmp_path / "c")
    assert [each.choice for each in record.judgements][-1] == "tie" and len(record.judgements) == 2
    with pytest.raises(RefusedJudgement, match="another judgement"):
        opened.judge(judgement(1, choice="second"))


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
