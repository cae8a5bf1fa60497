"""OpenEnv's protocol against a small server that goes wrong as it is told: what is played, told, tried again."""

import asyncio
import json
import time

import numpy as np
import pytest
from aiohttp import web
from fake_servers import FakeOpenEnv, error, observation, play, serving
from mistakes import assert_one_line

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Provenance
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.models.builtin.tokenizer import character_tokenizer

pytestmark = pytest.mark.waits

TOKENIZER = character_tokenizer()
OPTIONS = dict(prompt="Say a word. ", action={"word": "{answer}"}, observation="board", timeout=5.0)


def task_of(port: int, style: str = "compact", folders=(), token: str = "", **options):
    settings = OPTIONS | dict(url=f"ws://127.0.0.1:{port}/ws") | options
    return make_task(TaskConfig(name="openenv", style=style, options=settings), list(folders))


def played(server: FakeOpenEnv, *answers: list[str], **options):
    """Of one prompt: the group, and what the generator was asked."""
    with serving(server.app) as port:
        task = task_of(port, **options)
        return play(task, next(PromptStream(task, 1)), list(answers), TOKENIZER)


def test_an_episode_is_a_reset_with_the_prompts_seed_and_a_step_for_each_answer():
    group, requests = played(server := FakeOpenEnv(), ["a", "bb", "ccc"])
    [rollout], [reset] = group.rollouts, server.resets
    begin = f"Say a word. seed {reset['seed']}\n"
    assert TOKENIZER.decode(rollout.tokens) == f"{begin}a<eos>a 1\nbb<eos>bb 2\nccc<eos>"
    said = rollout.tokens[rollout.provenance == Provenance.TOOL]
    assert TOKENIZER.decode(said) == f"seed {reset['seed']}\na 1\nbb 2\n"
    assert rollout.status == "ok" and rollout.turn_rewards == [0.1, 0.2, 0.3]
    assert rollout.reward == pytest.approx(0.6) and rollout.reward_parts == {"environment": pytest.approx(0.6)}
    assert [len(turn) for turn in map(TOKENIZER.decode, [r.tokens for r in requests])][0] == len(begin)
    assert server.active == 0, "the session was let go of"


def test_each_prompt_has_a_seed_and_those_that_are_held_out_share_none():
    task = task_of(1)
    train = [next(stream).entry["seed"] for stream in [PromptStream(task, 1)] for _ in range(50)]
    held_out = [prompt.entry["seed"] for prompt in held_out_prompts(task, 50)]
    assert len({*train, *held_out}) == 100
    assert train[0] == next(PromptStream(task_of(2), 1)).entry["seed"], "whatever the server"


def test_no_more_episodes_at_once_than_sessions():
    answers = [["a", "b", "c"] for _ in range(6)]
    group, _ = played(server := FakeOpenEnv(limit=2), *answers, sessions=2)
    assert [rollout.status for rollout in group.rollouts] == ["ok"] * 6
    assert server.most == 2


def test_whose_turn_does_not_come_is_an_infra_error_with_the_mend():
    """And no wrong answer, since it was not played."""

    async def slow(data):
        await asyncio.sleep(1)
        return observation("x", done=True)

    server = FakeOpenEnv(on={"step": slow})
    group, _ = played(server, ["a"], ["b"], session_timeout=0.3)
    assert sorted(rollout.status for rollout in group.rollouts) == ["infra_error", "ok"]
    [late] = [rollout for rollout in group.rollouts if rollout.status == "infra_error"]
    assert "task.options.sessions = 1" in late.failure and "verifier.episode_timeout" in late.failure
    assert not late.turns and late.reward == 0.0 and not late.reward_parts


def test_a_full_server_is_waited_for():
    """Somebody else has its only session, for a while."""

    class Full(FakeOpenEnv):
        limit_from = time.monotonic() + 1.0

        async def serve(self, request):
            self.limit = int(time.monotonic() > self.limit_from)
            return await super().serve(request)

    group, _ = played(Full(length=1), ["a"])
    assert group.rollouts[0].status == "ok"


def test_a_server_that_stays_full_is_told_by_name():
    group, _ = played(FakeOpenEnv(limit=0), ["a"], timeout=0.5)
    assert group.rollouts[0].status == "infra_error"
    assert "at capacity: set task.options.sessions, and verifier.procs" in group.rollouts[0].failure


def test_an_action_that_does_not_fit_is_told_to_the_model():
    group, _ = played(FakeOpenEnv(length=1), ["a", "b"], action={"wrong": "{answer}"}, max_turns=2)
    [rollout] = group.rollouts
    assert rollout.status == "ok" and "a<eos>error: word: no\nb<eos>" in TOKENIZER.decode(rollout.tokens)


def test_an_episode_ends_after_so_many_turns_with_what_the_last_one_earned():
    group, _ = played(FakeOpenEnv(length=9), ["aa", "b"], max_turns=2)
    assert group.rollouts[0].turn_rewards == [0.2, 0.1] and group.rollouts[0].status == "ok"


def dies(data):
    return None


async def hangs(data):
    await asyncio.sleep(1.5)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ({"step": dies}, ["was lost in an episode"]),
        ({"step": hangs}, ["an answer to a step did not come within task.options.timeout = 0.5 s"]),
        ({"step": lambda data: error("EXECUTION_ERROR", "board on fire")}, ["EXECUTION_ERROR: board on fire"]),
        ({"step": lambda data: "{"}, ["sent an invalid reply to a step"]),
        ({"step": lambda data: "[" * 100_000}, ["sent an invalid reply to a step: RecursionError"]),
        ({"step": lambda data: "[]"}, ["sent an invalid reply to a step"]),
        ({"step": lambda data: observation("x", reward=float("nan"))}, ["sent an invalid reply to a step"]),
        ({"step": lambda data: observation("x", reward="much")}, ["sent an invalid reply to a step"]),
        (
            {"step": lambda data: observation("x", reward="0.5")},
            ["invalid reply to a step: ValueError: 0.5: give a finite number"],
        ),
        ({"step": lambda data: observation("x", reward=10**4200)}, ["a whole number of 13953 bits: give a finite"]),
        ({"step": lambda data: observation("x", reward=-(10**400))}, ["a whole number of 1329 bits: give a finite"]),
        (
            {"step": lambda data: observation("x", reward=7).replace("7", "1" * 5000)},
            ["sent an invalid reply to a step"],
        ),
        ({"step": lambda data: observation("x", reward=7).replace("7", "1e400")}, ["inf: give a finite number"]),
        ({"step": lambda data: observation("x", reward=[1.0])}, ["sent an invalid reply to a step"]),
        ({"step": lambda data: observation("x", done="false")}, ["sent an invalid reply to a step"]),
        ({"step": lambda data: json.dumps({"type": "state", "data": {"observation": {}}})}, ["invalid reply"]),
        (
            {"step": lambda data: json.dumps({"type": "observation", "data": {"observation": {"bord": 1}}})},
            ["task.options.observation = 'board': an observation has 'bord'"],
        ),
        ({"reset": lambda data: error("FACTORY_ERROR", "no board")}, ["refused a reset: no board"]),
        ({"reset": lambda data: observation("x", done=True)}, ["over at the reset"]),
        ({"reset": hangs}, ["an answer to a reset did not come within"]),
        ({"reset": dies}, ["closed the connection before a session had begun"]),
    ],
)
def test_what_goes_wrong_there_is_an_infra_error_by_name_and_no_reward(on, words):
    server = FakeOpenEnv(on=on)
    timeout = 0.5 if hangs in on.values() else 3.0  # in which a busy machine answers
    group, _ = played(server, ["a", "b", "c"], timeout=timeout)
    [rollout] = group.rollouts
    assert (rollout.status, rollout.reward, rollout.reward_parts) == ("infra_error", 0.0, {})
    assert "ws://127.0.0.1" in rollout.failure or "task.options" in rollout.failure
    assert all(word in rollout.failure for word in words), rollout.failure
    assert server.active == 0


def test_a_reward_that_is_true_counts_as_one():
    """OpenEnv's own schema has ``reward: bool | int | float | None``."""
    group, _ = played(FakeOpenEnv(on={"step": lambda data: observation("x", reward=True, done=True)}), ["a"])
    assert (group.rollouts[0].status, group.rollouts[0].reward) == ("ok", 1.0)


def test_a_server_whose_first_reward_no_float_holds_is_refused_in_one_line():
    with serving(FakeOpenEnv(on={"reset": lambda data: observation("x", reward=10**4200)}).app) as port:
        task = task_of(port)
        with pytest.raises(
            ConfigError, match="sent an invalid reply to a reset: ValueError: a whole number of 13953 bi"
        ):
            task.check_ready()


def test_a_beginning_is_tried_again_and_a_step_never():
    deaths = iter([None, None])
    server = FakeOpenEnv(length=1, on={"reset": lambda data: next(deaths, observation("now"))}, refusals=2)
    group, _ = played(server, ["a"])
    assert group.rollouts[0].status == "ok" and len(server.headers) == 5

    steps = []
    server = FakeOpenEnv(on={"step": lambda data: steps.append(data)})
    assert played(server, ["a", "b"])[0].rollouts[0].status == "infra_error" and len(steps) == 1


def test_one_that_fails_takes_no_other_with_it():
    server = FakeOpenEnv(
        limit=3, on={"step": lambda data: observation("x", done=True) if data["word"] != "b" else None}
    )
    group, _ = played(server, ["a"], ["b"], ["c"], sessions=3)
    assert [rollout.status for rollout in group.rollouts] == ["ok", "infra_error", "ok"]


def test_no_redirect_is_followed():
    followed = []

    async def elsewhere(request):
        raise web.HTTPFound("/other")

    async def other(request):
        followed.append(request)
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/ws", elsewhere), web.get("/other", other)])
    with serving(app) as port:
        task = task_of(port)
        [rollout] = play(task, next(PromptStream(task, 1)), [["a"]], TOKENIZER)[0].rollouts
    assert not followed and "the server answered 302" in rollout.failure


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "socks_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    group, _ = played(FakeOpenEnv(length=1), ["a"])
    assert group.rollouts[0].status == "ok"


def test_a_token_is_sent_and_told_to_nobody(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sesame")
    server = FakeOpenEnv(on={"step": dies})
    group, _ = played(server, ["a"], token_env="MY_TOKEN")
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    assert group.rollouts[0].failure and "sesame" not in group.rollouts[0].failure
    monkeypatch.delenv("MY_TOKEN")
    [rollout] = played(FakeOpenEnv(), ["a"], token_env="MY_TOKEN")[0].rollouts
    assert "task.options.token_env = 'MY_TOKEN': there is no such variable" in rollout.failure


OWN = """
from titan_rl.environments.interfaces.tool import ToolError

def action(answer):
    if answer == "no":
        raise ToolError("say yes")
    if answer == "number":
        return 7
    if answer == "raise":
        raise KeyError("mine")
    return {"word": answer * 2}

def text(observation):
    return 5 if observation["board"] == "bb 1" else f"<{observation['board']}>"
"""


@pytest.fixture(scope="module")
def own_mapping(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mapping_of_tests.py").write_text(OWN)
    return str(folder)


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        (["a", "c"], "ok", "a<eos><aa 1>\n"),
        (["no", "c"], "ok", "no<eos>error: say yes\n"),
        (["raise"], "infra_error", "mapping_of_tests:action: KeyError"),
        (["number"], "infra_error", "must give a dict of plain values, as in JSON: it gave type int"),
        (["b"], "infra_error", "mapping_of_tests:text gave 5: give text"),
    ],
)
def test_functions_of_ones_own_map_answers_and_observations(answers, status, words, own_mapping):
    own = dict(action="mapping_of_tests:action", observation="mapping_of_tests:text", folders=[own_mapping])
    [rollout] = played(FakeOpenEnv(length=2), answers, **own, max_turns=2)[0].rollouts
    assert rollout.status == status and words in (TOKENIZER.decode(rollout.tokens) + rollout.failure)


def test_half_a_character_is_no_fault_of_the_machinery():
    server = FakeOpenEnv(length=1, on={"reset": lambda data: observation("half \ud800")})
    [rollout] = played(server, ["a"])[0].rollouts
    assert rollout.status == "ok" and "half ?" in TOKENIZER.decode(rollout.tokens)


def test_first_words_that_leave_no_room_refuse_the_prompt():
    server = FakeOpenEnv(on={"reset": lambda data: observation("x" * 600)})
    group, requests = played(server, ["a"])
    assert group.refused == "prompt_too_long" and not group.rollouts and not requests and server.active == 0


# before a run


def test_a_server_that_plays_along_is_ready():
    with serving((server := FakeOpenEnv()).app) as port:
        task_of(port).check_ready()
        assert server.active == 0 and len(server.resets) == 1


def test_ready_or_not_can_be_told_within_an_event_loop():
    async def checked(port: int) -> None:
        task_of(port).check_ready()

    with serving(FakeOpenEnv().app) as port:
        asyncio.run(checked(port))


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        (dict(limit=0), {}, ["at capacity", "start the server"]),
        (dict(on={"reset": lambda data: "?"}), {}, ["invalid reply"]),
        ({}, dict(observation="bord"), ["task.options.observation = 'bord': an observation has 'board'"]),
        ({}, dict(action={"wort": "{answer}"}), ["lacks 'word'"]),
        ({}, dict(action={"word": "x", "more": "{answer}"}), ["takes no 'more'"]),
    ],
)
def test_what_would_fail_in_each_episode_is_told_before_the_first(server, options, words):
    with serving(FakeOpenEnv(**server).app) as port, pytest.raises(ConfigError) as caught:
        task_of(port, **options).check_ready()
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said


def test_a_server_that_is_not_there_is_told_within_seconds():
    with serving(FakeOpenEnv().app) as port:
        pass
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        task_of(port).check_ready()
    assert f"ws://127.0.0.1:{port}/ws" in str(caught.value) and "start the server" in str(caught.value)
    assert time.monotonic() - start < 8


def test_a_run_is_refused_in_one_line_where_its_server_is_not_there():
    with serving(FakeOpenEnv().app) as port:
        pass
    url = f"ws://127.0.0.1:{port}/ws"
    tables = {"task": {"name": "openenv", "options": OPTIONS | {"url": url}}, "eval": {"prompts": 2}}
    assert_one_line(tables, [url, "start the server"])
    tables["sft"] = {"steps": 1}
    assert_one_line(tables, ["sft.steps = 0"])


def test_only_the_check_speaks_to_the_server():
    """Scorers and verifiers make the task, too, and so does whoever replays a run."""
    with serving((server := FakeOpenEnv()).app) as port:
        task = task_of(port)
        task.prompt("train", 1, 0), held_out_prompts(task, 3), task.score(task.prompt("train", 1, 0), ["a"])
        assert not server.headers


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(url=None), ["needs task.options.url", "ws://127.0.0.1:8000/ws"]),
        (dict(url=""), ["needs task.options.url"]),
        (dict(url="http://127.0.0.1:8000/ws"), ["task.options.url", "ws://127.0.0.1:8000/ws"]),
        (dict(url="ws://127.0.0.1:8000"), ["no path", "/ws"]),
        (dict(url="ws://127.0.0.1:99999/ws"), ["task.options.url", "Port"]),
        (dict(url="ws://me:secret@host/ws"), ["task.options.token_env"]),
        (dict(url="ws://host/ws?key=secret"), ["task.options.token_env"]),
        (dict(action=None), ["needs task.options.action", "{answer}"]),
        (dict(action={"word": "answer"}), ["task.options.action", "{answer}"]),
        (dict(action="action"), ["task.options.action = 'action'", "module:name"]),
        (dict(action="nowhere_at_all:f"), ["task.options.action", "nowhere_at_all"]),
        (dict(observation=None), ["needs task.options.observation"]),
        (dict(prompt=None), ["needs task.options.prompt"]),
        (dict(prompt=""), ["task.options.prompt"]),
        (dict(sessions=0), ["task.options.sessions"]),
        (dict(seesions=2), ["task.options.seesions", "sessions"]),
    ],
)
def test_mistakes_are_one_line_that_holds_no_secret(changed, words):
    options = OPTIONS | dict(url="ws://127.0.0.1:8000/ws") | changed
    options = {name: value for name, value in options.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        make_task(TaskConfig(name="openenv", options=options), [])
    said = str(caught.value)
    assert "\n" not in said and "secret" not in said and all(word in said for word in words), said


def test_it_has_no_other_reward_and_no_worked_examples():
    options = OPTIONS | dict(url="ws://127.0.0.1:8000/ws")
    with pytest.raises(ConfigError, match="leave task.reward out"):
        make_task(TaskConfig(name="openenv", options=options, reward="my:reward"), [])
    with pytest.raises(ConfigError, match=r"sft\.steps = 0"):
        task_of(1).demonstration(task_of(1).prompt("train", 1, 0))


def test_tokens_that_the_model_did_not_write_have_no_logprob_and_no_version():
    [rollout] = played(FakeOpenEnv(), ["a", "b", "c"])[0].rollouts
    others = rollout.provenance != Provenance.MODEL
    assert np.all(rollout.logprobs[others] == 0) and np.all(rollout.versions[others] == -1)
    assert [rollout.tokens[turn.start : turn.stop].tolist() for turn in rollout.turns] == [
        [*TOKENIZER.encode(word), TOKENIZER.eos_token_id] for word in "abc"
    ]
