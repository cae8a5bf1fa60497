"""The collection page: whatever a browser sends is a judgement or one line, and so is whatever a file holds."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzzing import ANY_TEXT, VALUES, as_json, assert_one_line, fuzz, lists_of, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.config.io.bounded_files import parse_json
from titan_rl.config.load import ConfigError
from titan_rl.records.preferences.collection import Collection, Settings, create, read_collection
from titan_rl.records.preferences.items import Item, shuffled
from titan_rl.records.preferences.journal import latest
from titan_rl.records.preferences.judgements import RefusedJudgement, judgement_of, page_choices
from titan_rl.records.preferences.rows import judged_items, rows_of
from titan_rl.records.preferences.summary import summary_of, table

JUDGEMENT = {"id": "id-000001", "item": "0000", "who": "Ann", "choice": "first", "edit": "é", "seconds": 1.5}
OWN = JUDGEMENT | {"choice": "a", "shown": [1, 0], "time": 1e9}
ITEMS = [Item(f"{n}?", (f"a{n}", f"b{n}"), f"line {n}", "a" if n == 2 else "") for n in range(3)]
NUMBERED = st.builds(
    lambda number, choice: JUDGEMENT | {"id": f"id-{number:06d}", "choice": choice, "edit": ""},
    st.integers(0, 3),
    st.sampled_from(["first", "second", "tie"]),
)
SENT = NUMBERED | NUMBERED.flatmap(spoilt) | VALUES


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        create(path := Path(made, "c"), Settings("pairs", 1, 2, {}), shuffled(ITEMS, 1))
        yield path


@fuzz(sent=lists_of(SENT.map(as_json) | ANY_TEXT))
def test_what_a_browser_sends_is_recorded_or_refused_in_one_line(sent):
    with folder() as path:
        collection, saved, ids = Collection(path), {}, set()
        for text in sent:
            try:
                judgement = judgement_of(parse_json(text.encode("utf-8", "surrogatepass")), page_choices("pairs"))
                is_new = judgement.id not in ids
                own = collection.judge(judgement)
                ids.add(own.id)
                if is_new:
                    saved[own.item, own.who] = own.choice
            except ValueError as error:
                assert_one_line(error) if isinstance(error, RefusedJudgement) else None
        collection.close()
        record = read_collection(path)
        counted = {key: each.choice for key, each in latest(record.judgements).items()}
        assert counted == saved


def read(path: Path) -> None:
    """All that is made of a collection."""
    try:
        record = read_collection(path)
        Collection(path).close()
    except ConfigError as error:
        return assert_one_line(error)
    judged = judged_items({(each.item, each.who): each for each in record.judgements})
    json.dumps(rows_of(record.items, judged), ensure_ascii=False).encode()
    assert table(summary_of(record))


FILES = st.sampled_from(["judgements.jsonl", "items.jsonl", "collection.json"])
LINES = st.sampled_from([OWN, ITEMS[0].as_dict() | {"id": "0000"}]).flatmap(spoilt).map(as_json) | ANY_TEXT


@fuzz(name=FILES, lines=lists_of(LINES), ends=st.sampled_from(["\n", "\r\n", ""]))
def test_any_lines_are_a_collection_or_one_line(name, lines, ends):
    with folder() as path:
        (path / name).write_bytes(ends.join([*lines, ""]).encode("utf-8", "surrogatepass"))
        read(path)


@fuzz(name=FILES, data=st.just((json.dumps(OWN) + "\n").encode()).flatmap(mutated))
def test_any_bytes_are_a_collection_or_one_line(name, data):
    with folder() as path:
        (path / name).write_bytes(data)
        read(path)
