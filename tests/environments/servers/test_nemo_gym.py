"""NeMo Gym's protocol against a small server that goes wrong as it is told: the verifier plays the agent."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web
from chat_templates import with_template
from fake_servers import FakeNemoGym, play, serving

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Provenance
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.models.builtin.tokenizer import character_tokenizer

pytestmark = pytest.mark.waits

TOKENIZER = character_tokenizer()


def schema(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters |= {"additionalProperties": False}
    return {"type": "function", "name": name, "description": "", "strict": True, "parameters": parameters}


TOOLS = [schema("increment_counter", count={"type": "integer"}), schema("get_counter_value")]


def row(number: int = 1, **changed) -> dict:
    asked = {"input": [{"role": "user", "content": f"add {number}"}], "tools": TOOLS} | changed
    return {"responses_create_params": asked, "initial_count": 3, "expected_count": 3 + number}


def task_of(folder, port: int, style: str = "compact", rows=None, **options):
    lines = [row(number) for number in range(1, 9)] if rows is None else rows
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    options = dict(url=f"http://127.0.0.1:{port}", file="rows.jsonl", timeout=5.0) | options
    return make_task(TaskConfig(name="nemo_gym", style=style, options=options), [str(folder)])


def prompt_of(task, number: int = 1):
    """The one that asks to add the number."""
    found = (task.prompt(stream, 1, index) for stream in ("train", "held_out") for index in range(8))
    return next(prompt for prompt in found if prompt.text == f"add {number}")


def played(folder, server: FakeNemoGym, *answers: list[str], **options):
    with serving(server.app) as port:
        task = task_of(folder, port, **options)
        return play(task, prompt_of(task), list(answers), TOKENIZER)


def test_the_model_calls_the_servers_tools_and_the_server_rewards(tmp_path):
    answers = ["increment_counter(1)", "get_counter_value()", "4"]
    group, requests = played(tmp_path, server := FakeNemoGym(), answers, ["4"])
    first, second = group.rollouts
    assert TOKENIZER.decode(first.tokens) == (
        'add 1increment_counter(1)<eos>={"success": true}\nget_counter_value()<eos>={"count": 4}\n4<eos>'
    )
    assert TOKENIZER.decode(first.tokens[first.provenance == Provenance.TOOL]) == '={"success": true}\n={"count": 4}\n'
    assert (first.status, first.reward) == ("ok", 1.0) and (second.status, second.reward) == ("ok", 0.0)
    assert [[call.name for call in turn.calls] for turn in first.turns] == [
        ["increment_counter"],
        ["get_counter_value"],
        [],
    ]
    assert len(requests[0].seeds) == 2 and len(requests) == 3, "the first turn is one request for all"
    assert len(server.counters) == 2, "each sample has a session of its own"


def test_what_is_verified_is_the_row_and_a_response_as_openai_has_it(tmp_path):
    server = FakeNemoGym()
    played(tmp_path, server, ["increment_counter(1)", "4"])
    [(_, verified)] = [each for each in server.seen if each[0] == "verify"]
    response = verified.pop("response")
    assert verified == row(1) and server.seen[0] == ("seed_session", row(1))
    call, output, message = response["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "increment_counter",
        {"count": 1},
    )
    assert output == {"type": "function_call_output", "call_id": call["call_id"], "output": '{"success": true}'}
    assert (message["type"], message["role"], message["content"][0]["text"]) == ("message", "assistant", "4")
    assert response["object"] == "response" and len({call["id"], message["id"]}) == 2


def test_calls_of_one_answer_are_made_in_their_order(tmp_path):
    first = asyncio.Event()

    async def slow(body):
        if not first.is_set():
            first.set()
            await asyncio.sleep(0.2)
        order.append(body["count"])
        return web.json_response({})

    order, server = [], FakeNemoGym({"increment_counter": slow})

    def tagged(count: int) -> str:
        return f"<tool_call>{json.dumps({'name': 'increment_counter', 'arguments': {'count': count}})}</tool_call>"

    async def step(port: int) -> None:
        task = task_of(tmp_path, port, "chat")
        environment = task.environment(prompt_of(task))
        await environment.reset()
        reply = await environment.step(f"both: {tagged(1)}{tagged(2)}<tool_call>{{</tool_call>")
        assert [call.status for call in reply.calls] == ["ok", "ok", "error"]
        await environment.step("done")
        await environment.close()

    with serving(server.app) as port:
        asyncio.run(step(port))
    assert order == [1, 2]
    output = server.seen[-1][1]["response"]["output"]
    kinds = ["message", "function_call", "function_call_output", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in output] == kinds and "both:" in output[0]["content"][0]["text"]


def test_a_turn_that_only_calls_has_no_message(tmp_path):
    server = FakeNemoGym()
    played(tmp_path, server, ["increment_counter(1)"], max_turns=1)
    assert [path for path, _ in server.seen] == ["seed_session", "increment_counter", "verify"]
    types = [item["type"] for item in server.seen[-1][1]["response"]["output"]]
    assert types == ["function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("answer", "on", "told"),
    [
        ("increment_counter(x)", {}, "error: increment_counter: count: 'x' is not of type 'integer'"),
        ("increment_counter(1e999)", {}, "is not of type 'integer'"),
        ("increment_counter(1)", {"increment_counter": web.json_response}, "error: {}"),
        ("get_counter_value(1)", {}, "error: get_counter_value takes other than one argument"),
    ],
)
def test_what_the_model_did_wrong_it_is_told(answer, on, told, tmp_path):
    on = {path: lambda body, make=make: make({}, status=422) for path, make in on.items()}
    [rollout] = played(tmp_path, FakeNemoGym(on), [answer, "4"])[0].rollouts
    assert rollout.status == "ok" and told in TOKENIZER.decode(rollout.tokens)
    assert rollout.turns[0].calls[0].status == "error"


@pytest.mark.parametrize(
    ("arguments", "reply"),
    [
        ('{"value": 1e999}', "error: "),
        ('{"value": "half \\ud800"}', "error: "),
        ('{"name": "x", "self": 1}', '{"name": "x", "self": 1}'),
    ],
)
def test_arguments_that_cannot_be_sent_are_no_fault_of_the_machinery(arguments, reply, tmp_path):
    """Infinity is no JSON, half a character is no text; and a tool's arguments may have any name."""
    anything = {"type": "object", "properties": {}}
    tool = {"type": "function", "name": "take", "parameters": anything}
    server = FakeNemoGym({"take": lambda body: web.json_response(body)})

    async def step(port: int):
        task = task_of(tmp_path, port, "chat", [row(1, tools=[tool]), row(2, tools=[tool])])
        environment = task.environment(prompt_of(task))
        await environment.reset()
        step_reply = await environment.step(f'<tool_call>{{"name": "take", "arguments": {arguments}}}</tool_call>')
        await environment.step("done")
        await environment.close()
        return step_reply.messages[0]["content"]

    with serving(server.app) as port:
        assert asyncio.run(step(port)).startswith(reply)


def status(number: int):
    return lambda body: web.json_response({"detail": "on fire"}, status=number)


async def hangs(body):
    await asyncio.sleep(1.5)
    return web.json_response({})


def text(said: str):
    return lambda body: web.Response(text=said)


PACKED = gzip.compress(gzip.compress(bytes(32 << 20)))
"""A few hundred bytes that are 32 MiB where they are unpacked as often as they say."""


def unpacked(encoding, data):
    return lambda body: web.Response(body=data, headers={"Content-Encoding": encoding})


def redirect(body):
    raise web.HTTPFound("/other")


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ({"seed_session": status(500)}, ["/seed_session answered 500", "on fire"]),
        ({"seed_session": status(422)}, ["/seed_session refused a row with 422"]),
        ({"seed_session": hangs}, ["/seed_session did not answer within task.options.timeout = 0.5 s"]),
        ({"seed_session": redirect}, ["/seed_session answered 302"]),
        ({"increment_counter": status(500)}, ["tool increment_counter failed 1 times", "answered 500"]),
        ({"increment_counter": status(429)}, ["answered 429"]),
        ({"increment_counter": hangs}, ["/increment_counter did not answer within"]),
        ({"verify": status(500)}, ["/verify answered 500"]),
        ({"verify": status(422)}, ["/verify refused a response with 422"]),
        ({"verify": hangs}, ["/verify did not answer within"]),
        ({"verify": text("{")}, ["/verify answered with no JSON"]),
        ({"verify": unpacked("gzip, gzip", PACKED)}, ["/verify answered with Content-Encoding 'gzip, gzip'"]),
        ({"verify": unpacked("gzip", gzip.compress(b"{}"))}, ["where identity was asked for: let the server send"]),
        ({"verify": unpacked("identity", b" " * ((16 << 20) + 1))}, ["/verify answered with more than 16 MiB"]),
        ({"verify": text("[1]")}, ["/verify answered with no JSON object"]),
        ({"verify": text("{}")}, ["/verify gave the reward None"]),
        ({"verify": text('{"reward": NaN}')}, ["/verify gave the reward nan"]),
        ({"verify": text('{"reward": "1"}')}, ["/verify gave the reward 1"]),
        ({"verify": text('{"reward": true}')}, ["/verify gave the reward True: give a finite number"]),
        ({"verify": text('{"reward": 1e400}')}, ["/verify gave the reward inf: give a finite number"]),
        ({"verify": text(f'{{"reward": {10**4200}}}')}, ["/verify gave the reward a whole number of 13953 bits"]),
        ({"verify": text('{"reward": %s}' % ("1" * 5000))}, ["/verify answered with no JSON"]),
    ],
)
def test_what_goes_wrong_there_is_an_infra_error_by_name_and_no_reward(on, words, tmp_path):
    timeout = 0.5 if hangs in on.values() else 3.0  # in which a busy machine answers
    [rollout] = played(tmp_path, FakeNemoGym(on), ["increment_counter(1)", "4"], timeout=timeout)[0].rollouts
    assert (rollout.status, rollout.reward, rollout.reward_parts) == ("infra_error", 0.0, {})
    assert "http://127.0.0.1" in rollout.failure and all(word in rollout.failure for word in words), rollout.failure


def test_a_server_that_dies_in_an_episode_is_not_asked_again(tmp_path):
    class Dies(FakeNemoGym):
        async def serve(self, request):
            if request.match_info["path"] != "increment_counter":
                return await super().serve(request)
            calls.append(1)
            request.transport.abort()

    calls = []
    [rollout] = played(tmp_path, Dies(), ["increment_counter(1)", "4"])[0].rollouts
    assert rollout.status == "infra_error" and len(calls) == 1
    assert "RemoteProtocolError" in rollout.failure or "ReadError" in rollout.failure


def test_a_session_is_begun_again_while_the_server_comes_up(tmp_path):
    failures = iter([500, 503, 429])

    def seed(body):
        number = next(failures, None)
        return web.json_response({}, status=number or 200)

    server = FakeNemoGym({"seed_session": seed, "verify": lambda body: web.json_response({"reward": 0.5})})
    [rollout] = played(tmp_path, server, ["4"])[0].rollouts
    assert (rollout.status, rollout.reward) == ("ok", 0.5)
    assert [path for path, _ in server.seen].count("seed_session") == 4


def test_no_more_episodes_at_once_than_sessions(tmp_path):
    under_way, most = [], []

    async def verify(body):
        under_way.append(1)
        most.append(len(under_way))
        await asyncio.sleep(0.05)
        under_way.pop()
        return web.json_response({"reward": 1.0})

    group, _ = played(tmp_path, FakeNemoGym({"verify": verify}), *[["4"]] * 6, sessions=2)
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 6 and max(most) == 2


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    [rollout] = played(tmp_path, FakeNemoGym(), ["4"])[0].rollouts
    assert rollout.status == "ok"


# rows


def test_a_prompt_has_the_rows_messages_and_the_rows_tools(tmp_path):
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "type": "message", "content": parts}]
    other = row(2, tools=[schema("other")])
    task = task_of(tmp_path, 1, "chat", [row(1, input=asked), other, row(3, input="three", instructions="Now.")])
    prompts = [task.prompt(stream, 1, i) for stream in ("train", "held_out") for i in range(3)]
    written = {tokenizer.decode(encode_prompt(task, tokenizer, prompt)) for prompt in prompts}
    [brief] = [text for text in written if "Be brief." in text]
    assert "one\ntwo" in brief and "increment_counter" in brief and "other" not in brief
    [second] = [text for text in written if "add 2" in text]
    assert "other" in second and "increment_counter" not in second
    [third] = [text for text in written if "three" in text]
    assert "Now." in third


def test_a_demonstration_is_played_on_the_server_which_does_not_see_it(tmp_path):
    shown = ["increment_counter(1)", "4"]
    rows = [row(1) | {"demonstration": shown}, row(2)]
    with serving((server := FakeNemoGym()).app) as port:
        task = task_of(tmp_path, port, rows=rows)
        prompt = prompt_of(task)
        rollout = asyncio.run(demonstrate(prompt, task, TOKENIZER, 5))
        assert TOKENIZER.decode(rollout.tokens) == 'add 1increment_counter(1)<eos>={"success": true}\n4<eos>'
        with pytest.raises(ConfigError, match=r"rows.jsonl line 2: no 'demonstration'.*sft.steps = 0"):
            task.demonstration(prompt_of(task, 2))
    assert server.seen and all("demonstration" not in body for _, body in server.seen)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"question": "1+1"}, ["line 1", "responses_create_params"]),
        (row(1, input=[]), ["line 1", "input"]),
        (row(1, input=7), ["line 1", "'input' is 7"]),
        (row(1, input=[{"type": "function_call", "name": "x"}]), ["line 1", "only messages are played"]),
        (row(1, input=[{"role": "user", "content": [{"type": "input_image"}]}]), ["line 1", "only text is played"]),
        (row(1, input=[{"role": "judge", "content": "x"}]), ["line 1", "'judge'"]),
        (row(1, input=[{"role": "assistant", "content": "x"}]), ["line 1", "end with one that it must answer"]),
        (row(1, tools={}) | {"responses_create_params": {"input": "x", "tools": {"a": 1}}}, ["'tools' is"]),
        (row(1, tools=[{"type": "web_search"}]), ["line 1", "'function'"]),
        (row(1, tools=[schema("../admin")]), ["line 1", "a tool has the name"]),
        (row(1, tools=[schema("verify")]), ["line 1", "a tool has the name"]),
        (row(1, tools=[schema("x") | {"parameters": {"type": "thing"}}]), ["tool x", "no JSON schema"]),
        (row(1, tools=[schema("x") | {"parameters": "thing"}]), ["tool x", "give a JSON schema"]),
    ],
)
def test_a_row_that_cannot_be_played_is_told_with_its_line(broken, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        held_out_prompts(task_of(tmp_path, 1, rows=[broken, row(2)]), 1)
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said


def test_a_schema_is_looked_up_nowhere(tmp_path):
    """A row is somebody else's, and so is where its schema points to."""
    asked = []

    async def serve(request):
        asked.append(request.path)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    with serving(app) as port:
        tool = schema("x") | {"parameters": {"$ref": f"http://127.0.0.1:{port}/schema"}}
        task = task_of(tmp_path, port, rows=[row(1, tools=[tool]), row(2, tools=[tool])])
        [rollout] = play(task, prompt_of(task), [["x()"]], TOKENIZER)[0].rollouts
        assert rollout.status == "infra_error" and "schema" in rollout.failure
    assert asked == ["/seed_session"]


# before a run


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ({"seed_session": status(422)}, ["refused a row with 422", "start the server that these rows are for"]),
        ({"seed_session": status(500)}, ["answered 500"]),
    ],
)
def test_a_server_that_does_not_take_a_row_is_told_before_the_run(on, words, tmp_path):
    with serving(FakeNemoGym(on).app) as port, pytest.raises(ConfigError) as caught:
        task_of(tmp_path, port).check_ready()
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_one_that_does_is_ready_and_one_that_is_not_there_is_told(tmp_path):
    with serving((server := FakeNemoGym()).app) as port:
        task = task_of(tmp_path, port)
        next(PromptStream(task, 1))
        assert not server.seen, "only the check speaks to it"
        task.check_ready()
        assert [path for path, _ in server.seen] == ["seed_session"]
    with pytest.raises(ConfigError, match="ConnectError"):
        task.check_ready()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(url=None), ["needs task.options.url", "http://127.0.0.1:8000"]),
        (dict(url="ws://127.0.0.1:8000"), ["task.options.url", "http://127.0.0.1:8000"]),
        (dict(url="http://u:secret@127.0.0.1:8000"), ["task.options.token_env"]),
        (dict(file=None), ["task.options.file"]),
        (dict(max_turns=0), ["task.options.max_turns"]),
    ],
)
def test_mistakes_are_one_line(changed, words):
    options = dict(url="http://127.0.0.1:1", file="rows.jsonl") | changed
    with pytest.raises(ConfigError) as caught:
        make_task(TaskConfig(name="nemo_gym", options={k: v for k, v in options.items() if v is not None}), [])
    said = str(caught.value)
    assert "\n" not in said and "secret" not in said and all(word in said for word in words), said
