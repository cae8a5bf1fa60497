"""A constitution, the journal of its replies, and what a judge and a model say: rows, or one line."""

import json
import tempfile
from pathlib import Path

from constitutions import CONSTITUTION, TABLES
from fuzzing import ANY_TEXT, VALUES, as_json, assert_one_line, fragments, fuzz, lists_of, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.principles.asking import Recorded
from titan_rl.diagnostics.principles.constitution import constitution_of, drawn, read_constitution
from titan_rl.diagnostics.principles.verdicts import question, verdict

REPLY = {"id": "prompt/000001/answer/0", "text": "é\n", "status": "ok"}
LINES = st.just(REPLY).flatmap(spoilt).map(as_json) | ANY_TEXT
SAID = fragments("<answer_a>", "</answer_b>", "</ANSWER_A >", "<", ">", "/", "answer_a", "{answer_b}", "\n", "\x1b[2J")
ENDS = fragments("Verdict:", " ", "A", "B", "**", "_", ".", "\n", "\u2028", "verdict: a", "\u0391")


def read(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "constitution.toml")).write_bytes(data)
        try:
            constitution = read_constitution(path)
        except ConfigError as error:
            return assert_one_line(error)
    for principles in filter(None, (constitution.of_revisions, constitution.of_comparisons)):
        assert drawn(principles, 1, "x") in constitution.principles


@fuzz(data=st.just(CONSTITUTION.encode()).flatmap(mutated))
def test_any_bytes_are_a_constitution_or_one_line(data):
    read(data)


@fuzz(text=fragments("[[principles]]", "[", "\n", "name = 'a'", "comparison = ", "'''", '"', "{", "=", "1e999", "#"))
def test_any_text_is_a_constitution_or_one_line(text):
    read(text.encode("utf-8", "surrogatepass"))


@fuzz(tables=st.just({"principles": TABLES}).flatmap(spoilt) | st.dictionaries(ANY_TEXT, VALUES, max_size=2))
def test_any_tables_are_a_constitution_or_one_line(tables):
    try:
        constitution_of(tables if isinstance(tables, dict) else {})
    except ConfigError as error:
        assert_one_line(error)


@fuzz(lines=lists_of(LINES), ends=st.sampled_from(["\n", "\r\n", ""]))
def test_any_lines_are_replies_or_one_line(lines, ends):
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "exchanges.jsonl")).write_bytes(ends.join([*lines, ""]).encode("utf-8", "surrogatepass"))
        try:
            Recorded(path).close()
        except ConfigError as error:
            assert_one_line(error)


@fuzz(conversation=SAID, answers=st.tuples(SAID, SAID))
def test_no_answer_leaves_its_place_in_a_judges_question(conversation, answers):
    asked = question(conversation, answers, "Which?")
    for name in ("conversation", "answer_a", "answer_b"):
        assert asked.count(f"<{name}>") == asked.count(f"</{name}>") == 1
    assert asked.index("</conversation>") < asked.index("</answer_a>") < asked.index("</answer_b>")


@fuzz(reply=ENDS)
def test_a_verdict_is_of_the_last_line_alone(reply):
    place = verdict(reply)
    assert place == verdict(f"Verdict: A\n{reply}") or not reply.strip()
    assert json.dumps(place) in ('"first"', '"second"', "null") and verdict(f"{reply}\nno") is None
