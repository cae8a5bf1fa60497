"""What an agent asks of the endpoint, and what a model answers there: JSON in, JSON out, never a server error."""

import asyncio
import json
import random

from chat_templates import CHATML, QWEN, SCHEMA, with_template
from fuzzing import ANY_TEXT, VALUES, as_json, fragments, fuzz, spoilt
from hypothesis import strategies as st
from random_episodes import Engine

from titan_rl.data.types import Prompt, Sampling
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.agents.episodes import _EpisodeRequests
from titan_rl.environments.agents.openai_requests import read_chat
from titan_rl.environments.conversation.episode import Player
from titan_rl.environments.interfaces.task import Task

KEY = "key"
TOKENIZERS = {name: with_template(template) for name, template in (("chatml", CHATML), ("qwen", QWEN), ("none", None))}
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1", "/", "/v1/chat/completions/../x"]
MESSAGES = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": [{"type": "text", "text": "4,6="}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "shout", "arguments": '{"a": [1.5]}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "10"},
]
CHAT = {"model": "policy", "messages": MESSAGES, "tools": [SCHEMA], "max_tokens": 4, "stream": False, "n": 1}
CHAT |= {"logprobs": True, "return_token_ids": True, "stop": None, "response_format": {"type": "text"}}
COMPLETION = {"model": "policy", "prompt": "4,6=", "max_tokens": 4, "logprobs": 1, "stream": True, "echo": False}
TOKENS = COMPLETION | {"prompt": [[5, 6, 7]], "stream": False}
TOLD = {200, 400, 401, 404, 405, 410, 413, 503}

BODIES = st.sampled_from([CHAT, COMPLETION, TOKENS, {"messages": MESSAGES}]).flatmap(spoilt).map(as_json) | st.text()


class Asked(Task):
    seats = ()

    def messages(self, prompt):
        return "4,6="


def asking(tokenizer, answer: str) -> _EpisodeRequests:
    engine = Engine(random.Random(1), tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    engine.draw_tokens = lambda: tokenizer.encode(answer, add_special_tokens=False)[:200]
    sampling = Sampling(num_samples=1, max_new_tokens=200, temperature=1.0, max_tokens=4000)
    prompt = Prompt("train/0000001", "4,6=", "10", {})
    player = Player(prompt, Asked(), tokenizer, engine.ask, sampling, 1, 5.0, True)
    return _EpisodeRequests(player, 0)


def unstarted() -> Endpoint:
    """One that listens nowhere."""
    (endpoint := Endpoint()).base_url = ""
    return endpoint


async def requested(app, path: str, method: str, headers: list[tuple[bytes, bytes]], chunks: list[bytes]):
    """Status and body of a response."""
    left, sent = list(chunks), []

    async def receive():
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await app(scope | {"headers": headers, "http_version": "1.1", "root_path": ""}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def is_sound(status: int, body: bytes) -> None:
    assert status in TOLD
    if status in (404, 405):
        return
    for text in body.decode().split("\n\n") if body.startswith(b"data: ") else [body.decode()]:
        if (text := text.removeprefix("data: ")) and text != "[DONE]":
            said = json.loads(text, parse_constant=lambda name: 1 / 0)
    if status != 200:
        assert said["error"]["message"].isprintable() and len(said["error"]["message"]) < 1000


@fuzz(
    bodies=st.lists(st.tuples(st.sampled_from(PATHS[:2]), BODIES), min_size=1, max_size=3),
    answer=fragments('<tool_call>{"name": "shout", "arguments": {"a": "\\ud800"}}', "</tool_call>", "again"),
    template=st.sampled_from(list(TOKENIZERS)),
)
def test_whatever_is_asked_is_answered_or_refused_in_one_line(bodies, answer, template):
    async def ask():
        endpoint, session = unstarted(), asking(TOKENIZERS[template], answer)
        app = endpoint._app()
        with endpoint.open(session.answer, KEY):
            for path, body in bodies:
                data = body.encode("utf-8", "surrogatepass")
                headers = [(b"authorization", f"Bearer {KEY}".encode())]
                is_sound(*await requested(app, path, "POST", headers, [data[:50], data[50:]]))
        assert not session._generator_error.done()
        if (episode := session.branches.join()) is not None:
            assert all(isinstance(text, str) and text.encode() is not None for text in episode.answers)

    asyncio.run(ask())


NAMES = st.sampled_from([b"authorization", b"x-api-key", b"x-session-id", b"content-type", b"host"])
PAIRS = st.tuples(NAMES, st.binary(max_size=20) | st.sampled_from([b"Bearer key", b"key"]))
LENGTHS = st.sampled_from([b"0", b"5", b"99999999999"]).map(lambda length: (b"content-length", length))
HEADERS = st.lists(PAIRS | LENGTHS, max_size=5)


@fuzz(
    path=st.sampled_from(PATHS) | ANY_TEXT.map(lambda text: "/" + text.encode(errors="replace").decode()),
    method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "\x00"]),
    headers=HEADERS,
    chunks=st.lists(st.binary(max_size=50), min_size=1, max_size=3),
)
def test_whoever_asks_whatever_way_is_told_why_not(path, method, headers, chunks):
    async def ask():
        endpoint, session = unstarted(), asking(TOKENIZERS["chatml"], "")
        app = endpoint._app()
        with endpoint.open(session.answer, KEY):
            status, body = await requested(app, path, method, headers, chunks)
            assert status in TOLD | {307}

    asyncio.run(ask())


@fuzz(message=st.sampled_from(MESSAGES).flatmap(spoilt), more=VALUES)
def test_a_message_that_is_read_is_written_so_that_it_is_read_again(message, more):
    from titan_rl.environments.agents.openai_requests import Refused

    try:
        asked = read_chat(json.loads(as_json({"messages": [message, MESSAGES[-1]], "user": more})))
    except (Refused, ValueError, RecursionError):
        return
    for said in asked.messages:
        again = {"role": said.role, "content": said.content}
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in said.calls]
        [read, _] = read_chat({"messages": [again | {"tool_calls": calls}, MESSAGES[-1]]}).messages
        assert read == said
