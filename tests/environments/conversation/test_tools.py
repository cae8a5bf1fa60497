"""Tools that a model calls: what is read from its text, what is checked, what it is told, and what ends the episode."""

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Group, Rollout, ToolCall, Turn
from titan_rl.environments.conversation.tool_calls import Call, Malformed, read_calls, text_beside_calls
from titan_rl.environments.conversation.tools import MAX_CALLS, MAX_RESULT, ToolEnvironment
from titan_rl.environments.interfaces.environment import OVER, EnvironmentFailed, Reply
from titan_rl.environments.interfaces.tool import Tool, ToolError
from titan_rl.records.metrics import turn_metrics
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
WORD |= {"additionalProperties": False}


def tool(run, name: str = "shout", **settings) -> Tool:
    return Tool(name, "Say it louder.", WORD, run, **settings)


TOOLS = {"shout": tool(lambda word: word.upper())}


def parameters(**properties) -> dict:
    return {"type": "object", "properties": properties}


TYPED = {
    "add": Tool("add", "", parameters(count={"type": "integer"}), str),
    "any": Tool("any", "", parameters(value={}), str),
    "now": Tool("now", "", parameters(), str),
    "two": Tool("two", "", parameters(a={}, b={}), str),
}


def tagged(*calls) -> str:
    return "".join(f"<tool_call>{call if isinstance(call, str) else json.dumps(call)}</tool_call>" for call in calls)


CALL = {"name": "shout", "arguments": {"word": "a"}}


@pytest.mark.parametrize(
    ("answer", "style", "wanted"),
    [
        ("", "chat", []),
        ("It is 4.", "chat", []),
        ('{"answer": 4}', "chat", []),  # JSON, but no call
        (tagged(CALL), "chat", [Call("shout", {"word": "a"})]),
        (f"I think so.\n{tagged(CALL, CALL)} and more", "chat", [Call("shout", {"word": "a"})] * 2),
        (f"<tool_call>\n{json.dumps(CALL)}\n", "chat", [Call("shout", {"word": "a"})]),  # its end was not written
        (json.dumps(CALL), "chat", [Call("shout", {"word": "a"})]),
        (json.dumps([CALL, {"name": "x", "parameters": {}}]), "chat", [Call("shout", {"word": "a"}), Call("x", {})]),
        (tagged({"name": "shout"}), "chat", [Call("shout", {})]),
        ("shout(a)", "compact", [Call("shout", {"word": "a"})]),
        ("shout((a)+(b))", "compact", [Call("shout", {"word": "(a)+(b)"})]),
        ("whisper(a)", "compact", []),
        ("so shout(a)", "compact", []),
        (tagged(CALL), "compact", []),
    ],
)
def test_calls_are_read_from_what_was_written(answer, style, wanted):
    assert read_calls(answer, style, TOOLS) == wanted


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("add(3)", Call("add", {"count": 3})),
        ("add(x)", Call("add", {"count": "x"})),  # which its schema refuses
        ("add(" + "[" * 50_000 + ")", Call("add", {"count": "[" * 50_000})),
        ("any(3)", Call("any", {"value": "3"})),
        ("now()", Call("now", {})),
    ],
)
def test_a_compact_argument_is_what_its_schema_asks_for(answer, wanted):
    assert read_calls(answer, "compact", TYPED) == [wanted]


UNFIT = {
    "half a character": '"\\ud800"',
    "half a character in a name": '{"\\udfff": 1}',
    "more than a float": "1e999",
    "no number": "NaN",
    "deeper than it is handed on": "[" * 150 + "]" * 150,
    "deeper than it is read": "[" * 50_000,
    "more digits than are read": "9" * 5000,
}


@pytest.mark.parametrize("value", UNFIT.values(), ids=UNFIT)
def test_a_call_that_could_not_be_kept_is_told_to_the_model(value):
    call = f'{{"name": "any", "arguments": {{"value": {value}}}}}'
    [broken] = read_calls(f"<tool_call>{call}</tool_call>", "chat", TYPED)
    assert isinstance(broken, Malformed) and len(broken.why) < 300 and broken.why.isprintable()
    assert read_calls(call, "chat", TYPED) == []  # an answer that looks like one


def test_arguments_too_deep_for_their_schema_are_told_to_the_model():
    arguments: dict = {}
    for _ in range(400):
        arguments = {"in": arguments}
    nests = Tool("nests", "", {"type": "object", "properties": {"in": {"$ref": "#"}}}, str)
    assert nests.mistake(arguments) == "the arguments cannot be checked (RecursionError)"


HALVES = {"type": "object", "properties": {"x": {"multipleOf": 0.5}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "told"),
    [
        (HALVES, {"x": 10**400}, "cannot be checked"),
        (parameters(word={}), {"word": "a", "more": 1}, "unexpected keyword argument 'more'"),
        (parameters(word={}), {}, "missing a required argument: 'word'"),
    ],
)
def test_arguments_that_the_machinery_stumbles_over_are_the_models(schema, arguments, told):
    """Or it could choose that its answer is not trained on."""

    def shout(word):
        return word

    environment = ToolEnvironment([Tool("any", "", schema, shout)])
    reply = asyncio.run(environment.step(tagged({"name": "any", "arguments": arguments})))
    assert told in reply.messages[0]["content"] and reply.calls[0].status == "error"


def test_half_a_character_of_a_tool_is_a_question_mark():
    environment = ToolEnvironment([tool(lambda word: "\udcff!")])
    assert asyncio.run(environment.step(tagged(CALL))).messages == [{"role": "tool", "content": "?!"}]
    with pytest.raises(ValueError, match="half a character"):
        Reply([{"role": "user", "content": "\udcff!"}])


@pytest.mark.parametrize("answer", ["now(3)", "two(1)", "two()"])
def test_a_compact_call_has_one_argument_or_none_where_the_tool_takes_none(answer):
    [broken] = read_calls(answer, "compact", TYPED)
    assert isinstance(broken, Malformed) and "takes other than one argument" in broken.why


@pytest.mark.parametrize(
    ("answer", "style", "words"),
    [
        (" It is 4. ", "chat", "It is 4."),
        (tagged(CALL), "chat", ""),
        (f"I call {tagged(CALL)} now", "chat", "I call  now"),
        (json.dumps(CALL), "chat", ""),
        (f"so {tagged('{')}", "chat", f"so {tagged('{')}"),  # nothing of it is a call
        (f"so {tagged(CALL, '{')}", "chat", "so\n{"),
        ("shout(a)", "compact", ""),
        ("4", "compact", "4"),
    ],
)
def test_words_of_an_answer_are_what_its_calls_leave(answer, style, words):
    assert text_beside_calls(answer, style, read_calls(answer, style, TOOLS)) == words


@pytest.mark.parametrize(
    "text",
    ["", "{", "4", "[]", '{"name": 4}', '{"name": "shout", "arguments": "a"}', '{"name": "shout", "arguments": NaN}']
    + ['{"name": "shout", "arguments": {"word": ' + "[" * 50_000, "9" * 50_000],
)
def test_a_call_that_cannot_be_read_takes_no_other_with_it(text):
    first, broken, last = read_calls(tagged(CALL, text, CALL), "chat", TOOLS)
    assert first == last == Call("shout", {"word": "a"})
    assert isinstance(broken, Malformed) and len(broken.text) <= 200 and len(broken.why.splitlines()) == 1


def test_a_call_that_was_cut_behind_many_is_read_in_one_pass():
    """As an answer that repeats itself ends at ``max_new_tokens``; a pattern that backtracks would not come back."""
    *calls, cut = read_calls(
        tagged(*[CALL] * 1000) + '<tool_call>\n{"name": "shout", "arguments": {"word":', "chat", TOOLS
    )
    assert calls == [Call("shout", {"word": "a"})] * 1000 and isinstance(cut, Malformed)


def step(answer: str, *tools: Tool, style="chat") -> Reply:
    return asyncio.run(ToolEnvironment(tools or list(TOOLS.values()), style).step(answer))


def said(reply: Reply) -> list[str]:
    assert all(message["role"] == "tool" for message in reply.messages)
    return [message["content"] for message in reply.messages]


def test_results_come_in_the_order_of_the_calls_whichever_is_done_first():
    async def slow(word):
        await asyncio.sleep(0.05 if word == "a" else 0)
        return word * 2

    reply = step(tagged(CALL, {"name": "shout", "arguments": {"word": "b"}}), tool(slow))
    assert said(reply) == ["aa", "bb"] and [call.status for call in reply.calls] == ["ok", "ok"]
    assert [call.arguments for call in reply.calls] == ['{"word": "a"}', '{"word": "b"}'] and reply.calls[0].seconds > 0


def test_an_answer_without_a_call_is_the_last():
    assert step("It is A.") is OVER


def test_compact_results_are_set_apart_from_the_answer():
    assert said(step("shout(a)", style="compact")) == ["=A\n"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("{", "error: a call must be one JSON object"),
        ({"name": "whisper", "arguments": {}}, "error: there is no tool 'whisper': take one of shout"),
        ({"name": "shout", "arguments": {}}, "error: shout: $: 'word' is a required property"),
        ({"name": "shout", "arguments": {"word": 4}}, "error: shout: word: 4 is not of type 'string'"),
        ({"name": "shout", "arguments": {"word": "a", "x": 1}}, "error: shout: $: Additional properties"),
        ({"name": "shout", "arguments": {"word": "no"}}, "error: not that one"),
    ],
)
def test_what_the_model_did_wrong_it_is_told(call, words):
    def run(word):
        raise ToolError("not that one")

    reply = step(tagged(call), tool(run))
    assert said(reply)[0].startswith(words) and reply.calls[0].status == "error"


def test_a_tool_has_a_deadline_and_the_others_have_theirs():
    async def run(word):
        await asyncio.sleep(60 if word == "a" else 0)
        return word

    start = time.monotonic()
    reply = step(tagged(CALL, {"name": "shout", "arguments": {"word": "b"}}), tool(run, timeout=0.2))
    assert said(reply) == ["error: shout took longer than 0.2 s", "b"] and time.monotonic() - start < 10
    assert [call.status for call in reply.calls] == ["timeout", "ok"]


@pytest.mark.parametrize("num_failures", [0, 2, 3])
def test_what_the_machinery_did_wrong_is_tried_again_and_then_no_fault_of_the_models(num_failures):
    tries = []

    def run(word):
        tries.append(word)
        if len(tries) <= num_failures:
            raise ConnectionError("the server is gone")
        return word

    if num_failures == 3:
        with pytest.raises(EnvironmentFailed, match="tool shout failed 3 times: ConnectionError: the server is gone"):
            step(tagged(CALL), tool(run))
    else:
        assert said(step(tagged(CALL), tool(run))) == ["a"]
    assert len(tries) == min(num_failures + 1, 3)


def test_when_one_call_fails_the_others_are_ended():
    ended = []

    async def run(word):
        if word == "b":
            raise ConnectionError("the server is gone")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(word)

    with pytest.raises(EnvironmentFailed):
        step(tagged(CALL, {"name": "shout", "arguments": {"word": "b"}}), tool(run))
    assert ended == ["a"]


def test_neither_many_calls_nor_long_results_run_away():
    run = []
    reply = step(tagged(*[CALL] * 1000), tool(lambda word: run.append(word) or "x" * 10**6))
    assert len(run) == MAX_CALLS and "at most" in said(reply)[-1]
    assert len(reply.messages) == MAX_CALLS + 1 and max(map(len, said(reply))) == MAX_RESULT


def test_a_tool_whose_schema_is_none_is_refused():
    with pytest.raises(ConfigError, match="tool shout: its parameters are no JSON schema"):
        Tool("shout", "", {"type": "strin"}, str.upper)


def test_calls_are_recorded_and_counted(tmp_path):
    calls = (ToolCall("shout", '{"word": "a"}', "ok", 0.5), ToolCall("", "{", "error", 0.0))
    rollout = Rollout(
        prompt_id="train/0000001",
        sample=0,
        tokens=np.arange(3, 9, dtype=np.int32),
        provenance=np.array([0, 1, 2, 2, 2, 1], np.int8),
        logprobs=np.zeros(6, np.float32),
        versions=np.zeros(6, np.int32),
        turns=[Turn(1, 2, "stop", calls), Turn(5, 6, "stop")],
        status="ok",
    )
    write_rollouts(tmp_path, 1, [Group("train/0000001", [rollout])])
    [[read]] = [group.rollouts for group in read_rollouts(tmp_path, 1)]
    assert read.turns == rollout.turns
    assert turn_metrics([read]) == dict(
        turns=2.0, reply_tokens=0.5, max_turns=0.0, tool_calls=2.0, tool_calls_error=0.5, tool_calls_timeout=0.0
    )
    assert turn_metrics([replace(read, turns=read.turns[:1])]) == {}


def test_runs_of_before_there_were_calls_are_read(tmp_path):
    test_calls_are_recorded_and_counted(tmp_path)
    [file] = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["calls"]), file)
    assert [turn.calls for turn in read_rollouts(tmp_path, 1)[0].rollouts[0].turns] == [(), ()]
