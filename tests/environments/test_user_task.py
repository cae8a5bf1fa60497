"""A task from a file of the user's: asked and scored like any other, and every mistake is one line."""

import asyncio
from itertools import islice
from pathlib import Path

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.base import make_task
from titan_rl.environments.prompts import PromptStream, held_out_prompts
from titan_rl.environments.score import Score
from titan_rl.environments.scorer import Scorer
from titan_rl.environments.task import UserCodeError

TASK = '''
from titan_rl.data.types import Prompt
from titan_rl.environments.sessions import Sessions
from titan_rl.environments.tools import Tool

class Doubles:
    """Answers are doubled; one reply if the first answer is wrong."""

    def __init__(self, task):
        self.most = task.options["most"]

    def prompt(self, stream, seed, index):
        n = (seed + index) % self.most
        return Prompt(f"{stream}/{index:07d}", f"2*{n}=", str(2 * n), {"n": n})

    def messages(self, prompt):
        return prompt.text

    def demonstration(self, prompt):
        return prompt.answer

    def reply(self, prompt, answers):
        if answers[-1] == "trip":
            raise ValueError("tripped")
        return "again:" if answers == ["?"] else None

    def score(self, prompt, answers):
        if answers[-1] == "trip":
            raise ValueError("tripped")
        return {"correct": answers[-1] == prompt.answer}

class NoScore(Doubles):
    score = property()

class WrongId(Doubles):
    def prompt(self, stream, seed, index):
        return Prompt("7", "a", "b", {})

class NoPrompt(Doubles):
    def prompt(self, stream, seed, index):
        return "a"

class BadMessages(Doubles):
    def messages(self, prompt):
        return ["2*3="]

class Fickle(Doubles):
    made = 0
    def prompt(self, stream, seed, index):
        self.made += 1
        return super().prompt(stream, self.made, index)

class NotPlain(Doubles):
    def prompt(self, stream, seed, index):
        return Prompt(f"{stream}/{index:07d}", "a", "b", {"x": {1, 2}.__class__({1})})

class TooFew(Doubles):
    def reply(self, prompt):
        return None

class Silent:
    """No reply: the first answer is the last."""

    prompt, messages, demonstration, score = Doubles.prompt, Doubles.messages, Doubles.demonstration, Doubles.score
    def __init__(self, task):
        self.most = 1000

class Calls(Silent):
    tools = [Tool("twice", "", {"properties": {"n": {"type": "string"}}, "required": ["n"]}, lambda n: n * 2)]

class Steps(Calls):
    def environment(self, prompt):
        return prompt.text  # which is none, and who plays it will say so

class Opens(Steps):
    speaks_first = True
    sessions = Sessions(3, seconds=1.0)

class CallsAndReplies(Doubles):
    tools = []

class OddTools(Silent):
    tools = ["twice"]

class Finite(Doubles):
    size = (30, 10)

    def is_held_out(self, prompt):
        return prompt.id.startswith("held_out")

    def row(self, prompt):
        return {"n": prompt.entry["n"], "answer": prompt.answer, "level": 2}

def none(task):
    return None

def reward(prompt, completion, row):
    return {"level": row["level"], "n": row["n"]}
'''


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks_of_tests.py").write_text(TASK)
    return folder


def score(tasks: Path, prompt: Prompt, *answers: str) -> list[Score]:
    async def run():
        scorer = Scorer(own("Doubles"), [str(tasks)], 20.0, 4)
        try:
            return (await asyncio.wait_for(scorer.score(prompt, [[answer] for answer in answers]), 60))[0]
        finally:
            await scorer.stop()

    return asyncio.run(run())


def replies(task, prompt, answer: str) -> list[str]:
    reply = asyncio.run(task.environment(prompt).step(answer))
    return [message["content"] for message in reply.messages]


def own(name: str, **changes) -> TaskConfig:
    return TaskConfig(**dict(name=f"tasks_of_tests:{name}", options={"most": 1000}) | changes)


def test_a_task_of_ones_own_is_asked_and_scored(tasks):
    task = make_task(own("Doubles"), [str(tasks)])
    prompt = next(PromptStream(task, 1))
    assert prompt.text == f"2*{prompt.entry['n']}=" and task.size is None
    assert not {p.text for p in islice(PromptStream(task, 1), 50)} & {p.text for p in held_out_prompts(task, 40)}
    assert replies(task, prompt, "?") == ["again:"] and replies(task, prompt, "1") == []
    assert task.row(prompt) == {"question": prompt.text, "answer": prompt.answer, "n": prompt.entry["n"]}
    right, wrong, trip = score(tasks, prompt, prompt.answer, "no", "trip")
    assert (right.parts, wrong.parts, trip.status) == ({"correct": 1.0}, {"correct": 0.0}, "infra_error")
    assert "tasks_of_tests:Doubles': score: ValueError: tripped (tasks_of_tests.py, line" in trip.message
    with pytest.raises(UserCodeError, match="reply: ValueError: tripped .tasks_of_tests.py, line"):
        replies(task, prompt, "trip")


def test_an_episode_goes_on_by_tools_an_environment_or_not_at_all(tasks):
    silent, calls, steps = (make_task(own(name), [str(tasks)]) for name in ("Silent", "Calls", "Steps"))
    prompt = next(PromptStream(silent, 1))
    assert replies(silent, prompt, "twice(ab)") == [] and silent.tools == []
    assert replies(calls, prompt, "twice(ab)") == ["=abab\n"] and calls.tools[0]["function"]["name"] == "twice"
    assert steps.environment(prompt) == prompt.text and steps.tools == calls.tools


def test_its_environments_may_speak_first_and_wait_for_their_turn(tasks):
    steps, opens = (make_task(own(name), [str(tasks)]) for name in ("Steps", "Opens"))
    assert opens.speaks_first and opens.sessions.limit == 3
    assert not steps.speaks_first and steps.sessions is None


def test_a_task_of_ones_own_may_be_finite_and_take_a_reward(tasks):
    task = make_task(own("Finite", reward="tasks_of_tests:reward"), [str(tasks)])
    assert task.size == (30, 10) and len(held_out_prompts(task, 256)) == 10
    assert task.score(next(PromptStream(task, 1)), ["x"])["level"] == 2.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Double", ["there is no 'Double'", "did you mean 'Doubles'?"]),
        ("NoScore", ["without score(prompt, answers): add it"]),
        ("WrongId", ["gave the id '7': it must be 'check/0000000'"]),
        ("NoPrompt", ["prompt gave a str: give a titan_rl.data.types.Prompt"]),
        ("BadMessages", ["messages gave ['2*3=']: give text, or a list of {role, content}"]),
        ("Fickle", ["gave two different prompts"]),
        ("NotPlain", ["a prompt's entry must be plain values"]),
        ("TooFew", ["reply must take (prompt, answers), but it takes (prompt)"]),
        ("CallsAndReplies", ["with reply and tools: keep one of them"]),
        ("OddTools", ["tools holds 'twice': give titan_rl.environments.tools.Tool objects"]),
        ("none", ["made a NoneType without prompt(stream, seed, index)"]),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_is_one_line(tasks, name, words):
    with pytest.raises(ConfigError) as caught:
        make_task(own(name), [str(tasks)])
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"task.name = 'tasks_of_tests:{name}'") and all(word in line for word in words), line


def test_what_a_task_of_ones_own_raises_when_it_is_made_is_one_line(tasks):
    with pytest.raises(ConfigError, match="KeyError: 'most' .tasks_of_tests.py, line"):
        make_task(own("Doubles", options={}), [str(tasks)])
