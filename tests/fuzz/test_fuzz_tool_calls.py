"""What a model writes where it may call tools: read as calls or told what is wrong, and all of it can be kept."""

import asyncio
import json

from fuzzing import ANY_TEXT, VALUES, as_json, fragments, fuzz, spoilt
from hypothesis import strategies as st

from titan_rl.environments.agents.openai_requests import ChatMessage, ModelRequest, response_message
from titan_rl.environments.conversation.tool_calls import Call, Malformed, read_calls, text_beside_calls
from titan_rl.environments.conversation.tools import MAX_CALLS, MAX_RESULT, ToolEnvironment
from titan_rl.environments.interfaces.tool import Tool, ToolError
from titan_rl.environments.tasks.calculator import CALCULATOR

TREE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array", "items": {"minimum": 0}}},
    "additionalProperties": {"$ref": "#/properties/l"},
}


def echo(**arguments) -> str:
    if "no" in arguments:
        raise ToolError(str(arguments["no"]))
    return "".join(map(str, arguments.values()))


NUMBER = Tool("number", "", {"type": "object", "properties": {"n": {"type": "integer"}}}, run=echo)
TOOLS = [CALCULATOR, NUMBER, Tool("echo", "", TREE, run=echo), Tool("now", "", {"type": "object"}, run=echo)]
BY_NAME = {tool.name: tool for tool in TOOLS}
CALL = {"name": "echo", "arguments": {"n": 3, "s": "a", "l": [1, 2.5], "x": [0], "no": "no"}}
CALLS = st.sampled_from([CALL, {"name": "calc", "arguments": {"expression": "2*3"}}, [CALL, CALL]]).flatmap(spoilt)
WRITTEN = CALLS.map(as_json)
TAGGED = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "\n", "<tool_call>" * 12]) | WRITTEN | ANY_TEXT, max_size=9
).map("".join)
COMPACT = st.builds("{}({})".format, st.sampled_from(["calc", "number", "echo", "now", "x"]), WRITTEN | ANY_TEXT)
ANSWERS = TAGGED | WRITTEN | COMPACT | fragments("<tool_call>", "</tool_call>", '{"name": "echo"', "}", "calc(", ")")


@fuzz(
    examples=[
        {"answer": '<tool_call>{"name": "echo", "arguments": {"s": "\\ud800"}}</tool_call>', "style": "chat"},
        {"answer": '<tool_call>{"name": "echo", "arguments": {"x": [1e999]}}</tool_call>', "style": "chat"},
    ],
    answer=ANSWERS,
    style=st.sampled_from(["chat", "compact"]),
)
def test_each_call_runs_or_is_told_what_is_wrong_and_can_be_kept(answer, style):
    answer = answer.encode("utf-8", "replace").decode()  # as tokenizers decode
    for call in read_calls(answer, style, BY_NAME):
        if isinstance(call, Call):
            json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
        else:
            assert len(call.text) <= 200 and len(call.why) < 500
    text_beside_calls(answer, style, read_calls(answer, style, BY_NAME)).encode()
    reply = asyncio.run(ToolEnvironment(TOOLS, style).step(answer))
    assert len(reply.messages) <= MAX_CALLS + 1
    for message in reply.messages:
        assert len(message["content"].encode("utf-8", "strict").decode()) <= MAX_RESULT + 2
    for record in reply.calls:
        assert len(record.name.encode()) <= 2000 and len(record.arguments.encode()) <= 4 * 2000


NAMES = st.text(max_size=8)


@fuzz(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3),
    words=st.sampled_from(["", "Let me see."]),
)
def test_a_call_that_is_written_is_read_as_it_was(calls, words):
    written = tuple((name, json.dumps(given, sort_keys=True, ensure_ascii=False)) for name, given in calls)
    said = ChatMessage("assistant", words, written)
    read = response_message(said.text, ModelRequest(tools=("{}",)))
    broken = [text for _, text in written if "tool_call>" in text or not is_plain(text)]
    if not broken and not any("tool_call>" in name for name, _ in calls):
        assert read.calls == written and read.content.strip() == words


def is_plain(text: str) -> bool:
    """Whether it is JSON that can be told: of finite numbers and whole characters."""
    try:
        text.encode()
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return "1e+999" not in text


@fuzz(text=st.text(max_size=300))
def test_text_that_calls_nothing_is_words(text):
    read = read_calls(text, "chat", BY_NAME)
    assert not read or "<tool_call>" in text or all(isinstance(call, Call | Malformed) for call in read)
