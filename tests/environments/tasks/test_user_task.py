"""A task from a file of the user's: asked and scored like any other, and every mistake is one line."""

import asyncio
import inspect
import re
import sys
from itertools import islice
from pathlib import Path

import pytest

import titan_rl
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, TaskWrapper, UserCodeError
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.scoring.scorer import Scorer

TASK = '''
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.interfaces.tool import Tool

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

class Misspelled(Doubles):
    speak_first = True

class MisspelledMethod(Silent):
    def is_heldout(self, prompt):
        return False

class MisspelledOfTask(Task):
    def __init__(self, task): ...
    def prompt(self, stream, seed, index):
        return Prompt(f"{stream}/{index:07d}", "a", "b", {})
    def messages(self, prompt):
        return prompt.text
    def demonstration(self, prompt):
        return prompt.answer
    def score(self, prompt, answers):
        return 1.0
    def checkReady(self):
        pass

class MisspelledRequired(Silent):
    score = property()
    scores = Doubles.score

class NearNames(Doubles):
    """What is no hook, is never taken for one: another kind of thing, private, or beside the hook itself."""

    rows = [1, 2]
    _speak_first = True
    def replies(self): ...

class OddDifficulty(Doubles):
    def difficulty(self): ...

class SyncClose(Doubles):
    def close(self): ...

class AsyncScore(Doubles):
    async def score(self, prompt, answers): ...

class CalledSize(Doubles):
    def size(self): ...

class OddSeats(Doubles):
    seats = "white"

class OddSize(Doubles):
    size = 30

class Ready(Doubles):
    seen = []
    def check_ready(self):
        self.seen.append("check_ready")
    def prepare_episodes(self):
        self.seen.append("prepare_episodes")
    def prepare_scoring(self):
        self.seen.append("prepare_scoring")
    async def close(self):
        self.seen.append("close")
    def difficulty(self, prompt):
        return 3
    def tools_of(self, prompt):
        return [{"type": "function", "function": {"name": prompt.text}}]

class OwnTask(Task):
    prompt, messages, demonstration, score = Doubles.prompt, Doubles.messages, Doubles.demonstration, Doubles.score
    def __init__(self, task):
        self.most, self.size = 1000, (30, 10)

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
        ("NoPrompt", ["prompt gave a value of type str: give a titan_rl.data.types.Prompt"]),
        ("BadMessages", ["messages gave ['2*3=']: give text, or a list of {role, content}"]),
        ("Fickle", ["gave two different prompts"]),
        ("NotPlain", ["a prompt's entry must be plain values"]),
        ("TooFew", ["reply must take (prompt, answers), but it takes (prompt)"]),
        ("CallsAndReplies", ["with reply and tools: keep one of them"]),
        ("OddTools", ["tools holds 'twice': give titan_rl.environments.interfaces.tool.Tool objects"]),
        ("Misspelled", ["of type Misspelled with speak_first, which nothing calls: did you mean 'speaks_first'?"]),
        ("MisspelledMethod", ["with is_heldout", "did you mean 'is_held_out'?"]),
        ("MisspelledOfTask", ["with checkReady", "did you mean 'check_ready'?"]),
        ("MisspelledRequired", ["with scores", "did you mean 'score'?"]),
        ("OddDifficulty", ["difficulty must take (prompt), but it takes ()"]),
        ("SyncClose", ["close is awaited: define it with async def"]),
        ("AsyncScore", ["score is not awaited: define it without async"]),
        ("CalledSize", ["size is a method: make it an attribute or a property"]),
        ("OddSeats", ["seats = 'white': give a list or tuple of names"]),
        ("none", ["made an object of type NoneType without prompt(stream, seed, index)"]),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_is_one_line(tasks, name, words):
    with pytest.raises(ConfigError) as caught:
        make_task(own(name), [str(tasks)])
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"task.name = 'tasks_of_tests:{name}'") and all(word in line for word in words), line


def test_names_that_are_near_a_hooks_and_meant_are_let_be(tasks):
    assert not make_task(own("NearNames"), [str(tasks)]).speaks_first


def test_every_hook_of_a_task_of_ones_own_is_called(tasks):
    task = make_task(own("Ready", reward="tasks_of_tests:reward"), [str(tasks)])
    task.check_ready()
    task.prepare_episodes()
    task.prepare_scoring()
    asyncio.run(task.close())
    prompt = next(PromptStream(task, 1))
    assert sys.modules["tasks_of_tests"].Ready.seen == ["check_ready", "prepare_episodes", "prepare_scoring", "close"]
    assert task.difficulty(prompt) == "3" and task.tools_of(prompt)[0]["function"]["name"] == prompt.text


def test_a_task_of_ones_own_may_derive_from_task(tasks):
    task = make_task(own("OwnTask"), [str(tasks)])
    prompt = next(PromptStream(task, 1))
    assert task.size == (30, 10) and not task.has_agent and task.difficulty(prompt) is None
    assert replies(task, prompt, "1") == [] and task.score(prompt, [prompt.answer]) == {"correct": 1.0}


def test_a_size_that_is_no_pair_is_one_line(tasks):
    with pytest.raises(UserCodeError, match="size is 30: give .number of training prompts, number of held-out prompts"):
        make_task(own("OddSize"), [str(tasks)]).size  # noqa: B018 (what is asked is read then)


def test_a_wrapped_task_hands_every_hook_on():
    asked = {name for name in vars(Task) if not name.startswith("_")} - set(inspect.get_annotations(Task))
    assert asked <= set(vars(TaskWrapper))
    hooks = dict(tools=(1,), speaks_first=True, sessions=Sessions(1, 1.0), seats=("white",))
    assert set(hooks) == set(inspect.get_annotations(Task))
    wrapped = type("Own", (Task,), hooks)()
    assert all(getattr(TaskWrapper(wrapped), name) == value for name, value in hooks.items())


def test_no_hook_of_a_task_is_looked_for_by_name():
    hooks = "|".join(name for name in vars(Task) if not name.startswith("_"))
    probe = re.compile(rf"""(?:has|get)attr\([^)]*["'](?:{hooks})["']""")
    rooms = Path(titan_rl.__file__).parent
    files = [file for file in (*rooms.rglob("*.py"), *rooms.glob("actors/*.py")) if file.name != "user_task.py"]
    assert len(files) > 100
    assert {(file.name, found) for file in files for found in probe.findall(file.read_text())} == set()


def test_what_a_task_of_ones_own_raises_when_it_is_made_is_one_line(tasks):
    with pytest.raises(ConfigError, match="KeyError: 'most' .tasks_of_tests.py, line"):
        make_task(own("Doubles", options={}), [str(tasks)])
