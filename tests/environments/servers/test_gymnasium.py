"""Environments of gymnasium.make, in text: what is shown and done, and that one which blocks holds nobody else up."""

import asyncio
import sys
import threading
import time

import pytest
from fake_servers import play
from waiting import eventually

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Provenance
from titan_rl.environments.conversation.blocking_thread import MAX_LATE, BlockingThread, num_late
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.models.builtin.tokenizer import character_tokenizer

pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
TOKENIZER = character_tokenizer()
OWN = """
import threading

import gymnasium
from gymnasium import spaces

blocked = threading.Event()
closed = []


class Echo(gymnasium.Env):
    '''Says what it is told, and pays its length over ten; three words are an episode.'''

    observation_space = spaces.Text(99, charset="abcdefghijklmnopqrstuvwxyz0123456789 ")
    action_space = spaces.Text(4, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.thread = 0, threading.get_ident()
        return f"draw {self.np_random.integers(1000)}", {}

    def step(self, action):
        assert threading.get_ident() == self.thread, "one thread for all calls"
        if action == "hang":
            blocked.wait(20)
        if action == "fail":
            raise RuntimeError("the board is gone")
        if action == "exit":
            raise SystemExit(3)
        self.count += 1
        return f"{action} {self.count}", len(action) / 10, self.count == 3, False, {}

    def close(self):
        closed.append(self)


class Grid(gymnasium.Env):
    observation_space = spaces.Dict(board=spaces.Text(9), rest=spaces.Discrete(2))
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, observed="dict", space=None):
        self.observed = observed
        if space == "box":
            self.action_space = spaces.Box(0, 1)

    def reset(self, *, seed=None, options=None):
        return {"board": "start", "rest": 0}, {}

    def step(self, action):
        return {"board": f"went {action}", "rest": 1}, 1.0, False, True, {}


gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
gymnasium.register("Grid-v0", Grid, disable_env_checker=True)


def to_action(answer):
    return len(answer)


def to_text(observation):
    return observation["board"].upper()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("gym")
    (folder / "gym_of_tests.py").write_text(OWN)
    return str(folder)


def task_of(folder: str, name: str = "Echo-v0", style: str = "compact", **options):
    options = {"id": f"gym_of_tests:{name}", "prompt": "Play. ", "timeout": 5.0} | options
    return make_task(TaskConfig(name="gymnasium", style=style, options=options), [folder])


def played(task, *answers: list[str]):
    return play(task, next(PromptStream(task, 1)), list(answers), TOKENIZER)


def test_an_episode_is_a_reset_with_the_prompts_seed_and_a_step_for_each_answer(folder):
    group, _ = played(task_of(folder), ["a", "bb", "ccc"], ["a", "b", "c"])
    first, second = group.rollouts
    said = TOKENIZER.decode(first.tokens)
    begin = said[: said.index("\n") + 1]
    assert begin.startswith("Play. draw ") and said == f"{begin}a<eos>a 1\nbb<eos>bb 2\nccc<eos>"
    assert TOKENIZER.decode(second.tokens).startswith(begin), "samples of a prompt begin alike"
    assert first.turn_rewards == [0.1, 0.2, 0.3] and first.status == second.status == "ok"
    assert TOKENIZER.decode(first.tokens[first.provenance == Provenance.TOOL]) == f"{begin[6:]}a 1\nbb 2\n"
    assert len(sys.modules["gym_of_tests"].closed) == 2, "both were closed"
    threads = [thread for thread in threading.enumerate() if "gym_of_tests" in thread.name]
    for thread in threads:  # told to end; when it comes to its turn is the system's business
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_answer_that_is_no_action_is_told_and_costs_a_turn(folder):
    group, _ = played(task_of(folder, max_turns=2), ["LOUD", "bb"])
    [rollout] = group.rollouts
    assert "LOUD<eos>error: give at most 4 of its characters\nbb<eos>" in TOKENIZER.decode(rollout.tokens)
    assert rollout.status == "ok" and rollout.reward == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "answer", "told"),
    [
        (dict(observation="board"), "2", "start\n2<eos>"),
        (dict(observation="board"), "0", "error: give one whole number from 1 to 3\n"),
        (dict(observation="board"), "9" * 30, "error: give one whole number from 1 to 3\n"),
        (dict(observation="board", actions=["up", "down", "stay"]), "down", "start\ndown<eos>"),
        (dict(observation="board", actions=["up", "down", "stay"]), "left", "error: give one of up, down, stay\n"),
        (dict(observation="gym_of_tests:to_text"), "1", "START\n1<eos>"),
        (dict(observation="board", action="gym_of_tests:to_action"), "abc", "start\nabc<eos>"),
    ],
)
def test_actions_and_observations_are_what_the_options_make_of_them(options, answer, told, folder):
    right = options.get("actions", ["1"])[0]
    [rollout] = played(task_of(folder, "Grid-v0", **options), [answer, right])[0].rollouts
    assert rollout.status == "ok" and told in TOKENIZER.decode(rollout.tokens)
    assert rollout.reward == 1.0


def test_one_that_blocks_holds_nobody_up_but_itself(folder):
    start = time.monotonic()
    group, _ = played(task_of(folder, timeout=0.5), ["hang"], ["a", "b", "c"], ["d", "e", "f"])
    assert [rollout.status for rollout in group.rollouts] == ["infra_error", "ok", "ok"]
    assert "its step did not end within 0.5 s" in group.rollouts[0].failure
    assert time.monotonic() - start < 3 and num_late() == 1
    gym_of_tests = sys.modules["gym_of_tests"]
    before = len(gym_of_tests.closed)
    gym_of_tests.blocked.set()
    deadline = time.monotonic() + 60
    while len(gym_of_tests.closed) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(gym_of_tests.closed) == before + 1 and num_late() == 0, "it let go when it came back"


def test_calls_that_never_end_are_counted_and_then_none_is_begun():
    over = threading.Event()

    async def late() -> None:
        thread = BlockingThread("stuck")
        with pytest.raises(EnvironmentFailed, match="did not end within 0.01 s"):
            await thread.call("a call", lambda: over.wait(20), 0.01)
        with pytest.raises(EnvironmentFailed, match="an earlier call has not ended"):
            await thread.call("another", int, 1)
        await thread.end(int, 1)

    async def all_late() -> None:
        for _ in range(MAX_LATE):
            await late()
        with pytest.raises(EnvironmentFailed, match=f"{MAX_LATE} calls of episodes before it"):
            await BlockingThread("one more").call("a call", int, 1)
        over.set()
        await eventually(lambda: num_late() == 0, "the end of the late calls")
        thread = BlockingThread("free")
        assert await thread.call("a call", int, 5) == 0
        await thread.end(int, 5)

    asyncio.run(all_late())


@pytest.mark.parametrize(
    ("answer", "words"),
    [("fail", "its step: RuntimeError: the board is gone"), ("exit", "its step: SystemExit: 3")],
)
def test_what_it_raises_is_an_infra_error_by_name(answer, words, folder):
    [rollout] = played(task_of(folder), [answer])[0].rollouts
    assert (rollout.status, rollout.reward) == ("infra_error", 0.0) and words in rollout.failure


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Nothing-v0", {}, ["Nothing"]),
        ("Grid-v0", {}, ["of type dict", "task.options.observation"]),
        ("Grid-v0", dict(observation="bord"), ["'bord'", "'board'"]),
        ("Grid-v0", dict(observation="board", settings={"space": "box"}), ["Box", "task.options.action"]),
        ("Grid-v0", dict(observation="board", actions=["up"]), ["task.options.actions has 1 names"]),
        ("Grid-v0", dict(observation="board", settings={"nothing": 1}), ["nothing"]),
        ("Echo-v0", dict(actions=["up"]), ["task.options.actions"]),
    ],
)
def test_what_would_fail_in_each_episode_is_told_before_the_first(name, options, words, folder):
    with pytest.raises(ConfigError) as caught:
        task_of(folder, name, **options).check_ready()
    said = str(caught.value)
    assert "\n" not in said and "task.options.id" in said and all(word in said for word in words), said


def test_gymnasiums_own_are_played_by_what_they_render(folder):
    """FrozenLake without ice: two steps right and three down, and one right."""
    options = {"observation": "render", "settings": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
    options |= {"id": "FrozenLake-v1", "prompt": "Reach G. ", "max_turns": 20}
    task = make_task(TaskConfig(name="gymnasium", options=options), [folder])
    try:
        task.check_ready()
    except ConfigError as error:  # its toy texts want pygame to draw, in some releases even for text
        pytest.skip(str(error))
    way = ["right", "right", "down", "down", "down", "right"]
    [rollout] = played(task, way)[0].rollouts
    assert rollout.status == "ok" and rollout.reward == 1.0 and len(rollout.turns) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(id=None), ["needs task.options.id"]),
        (dict(prompt=None), ["needs task.options.prompt"]),
        (dict(action="a:b", actions=["x"]), ["exclude each other"]),
        (dict(action="to_action"), ["task.options.action", "module:name"]),
    ],
)
def test_mistakes_are_one_line(options, words, folder):
    given = {"id": "gym_of_tests:Echo-v0", "prompt": "x"} | options
    with pytest.raises(ConfigError) as caught:
        settings = {name: value for name, value in given.items() if value is not None}
        make_task(TaskConfig(name="gymnasium", options=settings), [folder])
    assert all(word in str(caught.value) for word in words)
