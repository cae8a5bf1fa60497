"""A reward from a file of the user's: its numbers count, and every fault is one line with its place."""

import asyncio
import json
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_rollouts import rollout_of

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import Config, RolloutConfig, TaskConfig
from titan_rl.data.types import Completion, Group, Prompt
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import UserCodeError
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.functions import as_parts
from titan_rl.environments.rollout.group import run_group
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.statistics import Proportion

REWARDS = '''
import asyncio, json, math, os, re, sys, time
from decimal import Decimal
from fractions import Fraction

def correct(prompt, completion, row):
    return completion == str(row["answer"])

def parts(prompt, completion, row):
    return {"asked": len(prompt), "level": row["level"], "done": True}

async def later(prompt, completion, row):
    await asyncio.sleep(0.001)
    return 0.5

LOOPS = set()

async def one_loop(prompt, completion, row):
    LOOPS.add(id(asyncio.get_running_loop()))
    return float(len(LOOPS))

def prints(prompt, completion, row):
    print('{"status": "ok", "parts": {"reward": 99.0}, "message": ""}', flush=True)
    print("SEEN", completion)
    return 0.25

def any_fault(prompt, completion, row):
    if completion == "raise":
        raise ValueError("tripped\\nover it")
    if completion == "deep":
        return json.loads("{")
    if completion == "exit":
        sys.exit(3)
    if completion == "hang":
        time.sleep(1000)
    return {"none": None, "nan": math.nan, "text": "1.0", "nested": {"a": {"b": 1.0}}, "list": [1.0], "empty": {},
            "numbered": {1: 1.0}, "infinite": {"a": math.inf}, "huge": -(10**400), "decimal": Decimal("0.5"),
            "fraction": Fraction(10**400)}.get(completion, 1.0)

def backtracks(prompt, completion, row):
    return re.fullmatch("(a+)+", completion) is not None

async def hangs(prompt, completion, row):
    await asyncio.sleep(1000 if completion == "hang" else 0)
    return 1.0

async def raises(prompt, completion, row):
    raise KeyError("no such thing")

async def chat(prompt, completion, row):
    return {"messages": float(len(prompt)), "role": float(prompt[-1]["role"] == "user")}

def entry(prompt, completion, row):
    assert sorted(row) == ["answer", "metadata", "question"], sorted(row)
    return {"own": float(row["answer"] == completion), "gcd": float(row["metadata"]["result"])}

def two(prompt, completion):
    return 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen = [data_source == "mine/sums", solution_str == ground_truth, extra_info == {"index": int(ground_truth)}]
    return {"score": float(sum(seen)), "acc": True, "pred": solution_str}

async def compute_later(solution_str, ground_truth, **others):
    return {"score": sorted(others) == ["data_source", "extra_info"] and others["data_source"] == ""}

def compute_parts(solution_str, ground_truth):
    return {"acc": 1.0}

def compute_at(url, solution_str, ground_truth):
    return 1.0

def of_trl(prompts, completions, answer, **kwargs):
    return [1.0]

def of_openrlhf(queries, prompts, labels):
    return [1.0]

def swapped(completion, prompt, row):
    return 1.0

def of_answer(prompt, completion, ground_truth):
    return 1.0

def asks_environment(prompt, completion, row):
    return float(os.environ["A_KEY_OF_MINE"] if completion == "variable" else row["nothing"])

NUMBER = 7
'''  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_tests.py").write_text(REWARDS)
    (folder / "broken_rewards_of_tests.py").write_text("import json\n1 / 0\n")
    rows = [{"question": f"q{n}", "answer": n, "level": n % 3} for n in range(20)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verl = [
        {
            "data_source": "mine/sums",
            "prompt": [{"role": "user", "content": f"q{n}"}],
            "reward_model": {"style": "rule", "ground_truth": f"{n}"},
            "extra_info": {"index": n},
        }
        for n in range(20)
    ]
    (folder / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl))
    chats = [{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": f"{n}"}]} for n in range(9)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


def config(reward: str, **changes) -> TaskConfig:
    return TaskConfig(**dict(name="jsonl", reward=f"rewards_of_tests:{reward}", options={"file": "q.jsonl"}) | changes)


def score(folder: Path, task: TaskConfig, *answers: str, timeout: float = 20.0, at_once: int = 4) -> list[Score]:
    """By a real scorer process, all answers to the stream's first prompt; {answer} is the expected one."""

    async def run():
        prompt = next(PromptStream(make_task(task, [str(folder)]), 1))
        scorer = Scorer(task, [str(folder)], timeout, at_once)
        try:
            given = [[answer.format(answer=prompt.answer)] for answer in answers]
            return (await asyncio.wait_for(scorer.score(prompt, given), 60))[0]
        finally:
            await scorer.stop()

    return asyncio.run(run())


# in the scorer process


def test_what_a_function_gives_is_the_reward(folder):
    assert [s.parts for s in score(folder, config("correct"), "{answer}", "no")] == [{"reward": 1.0}, {"reward": 0.0}]
    [parts] = score(folder, config("parts"), "x")
    assert parts.status == "ok" and sorted(parts.parts) == ["asked", "done", "level"]
    assert (
        parts.parts["asked"] in (2.0, 3.0) and parts.parts["done"] == 1.0 and parts.reward == sum(parts.parts.values())
    )


def test_async_functions_run_to_their_end_in_one_loop(folder):
    assert [s.parts for s in score(folder, config("later"), "a", "b")] == [{"reward": 0.5}] * 2
    assert [s.reward for s in score(folder, config("one_loop"), "a", "b", "c")] == [1.0, 1.0, 1.0]


def test_a_function_is_given_what_was_asked_where_the_file_has_messages_with_the_answer(tmp_path):
    (tmp_path / "asked_of_tests.py").write_text(
        "def reward(prompt, completion, row):\n    return prompt == completion\n"
    )
    rows = [{"problem": f"P{n}?", "messages": [{"role": "assistant", "content": f"LEAK {n}"}]} for n in range(5)]
    (tmp_path / "leak.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": "leak.jsonl", "columns": {"question": "problem"}}
    task = make_task(TaskConfig(name="jsonl", reward="asked_of_tests:reward", options=options), [str(tmp_path)])
    prompt = next(PromptStream(task, 1))
    assert task.score(prompt, [prompt.text]) == {"reward": 1.0} and prompt.text.startswith("P")


def test_a_function_with_verls_parameters_is_given_verls_arguments(folder):
    def rewards(reward: str, **changes) -> list:
        task = make_task(config(reward, **changes), [str(folder)])
        prompt = next(PromptStream(task, 1))
        return [task.score(prompt, [prompt.answer]), task.score(prompt, ["no"])]

    assert rewards("compute_score", style="chat", options={"file": "verl.jsonl"}) == [{"reward": 3.0}, {"reward": 2.0}]
    assert rewards("compute_later") == [{"reward": 1.0}] * 2
    with pytest.raises(UserCodeError, match=r"compute_parts: ValueError: gave {'acc': 1.0}: .* as 'score'"):
        rewards("compute_parts")


def test_a_variable_of_the_environment_that_is_asked_for_is_told_to_be_away(folder):
    """Whoever set it for the run would look for it in vain otherwise."""
    variable, column = score(folder, config("asks_environment"), "variable", "column")
    assert variable.message.endswith("; a reward sees no environment variables: read a file")
    assert "KeyError: 'nothing'" in column.message and "environment" not in column.message.partition("KeyError")[2]


def test_messages_are_given_as_the_row_has_them(folder):
    [given] = score(folder, config("chat", style="chat", options={"file": "chat.jsonl"}), "x")
    assert given.parts == {"messages": 2.0, "role": 1.0}


def test_reasoning_gym_prompts_come_with_their_entry(folder):
    [right, wrong] = score(folder, config("entry", name="gcd", options={}), "{answer}", "no")
    assert (right.parts["own"], wrong.parts["own"]) == (1.0, 0.0) and right.parts["gcd"] == wrong.parts["gcd"] >= 1


def test_what_a_function_prints_is_not_a_score_and_not_lost(folder, capfd):
    assert [s.reward for s in score(folder, config("prints"), "a", "b")] == [0.25, 0.25]
    assert {"SEEN a", "SEEN b"} <= set(capfd.readouterr().err.splitlines())


def test_a_fault_is_told_with_its_place_and_the_rest_is_scored(folder):
    faults = ["raise", "deep", "exit", "none", "nan", "text", "nested", "list", "empty", "numbered", "infinite"]
    faults += ["huge", "decimal", "fraction"]
    *scores, good = score(folder, config("any_fault"), *faults, "good")
    assert good.reward == 1.0 and good.message == ""
    for fault, given in zip(faults, scores, strict=True):
        assert (given.status, given.parts) == ("infra_error", {}), fault
        assert given.message.startswith("rewards_of_tests:any_fault") and "\n" not in given.message
    by_name = dict(zip(faults, (given.message.partition("any_fault")[2] for given in scores), strict=True))
    line = 1 + REWARDS.splitlines().index('        raise ValueError("tripped\\nover it")')
    assert by_name["raise"] == f": ValueError: tripped over it (rewards_of_tests.py, line {line})"
    assert (
        by_name["deep"].startswith(": JSONDecodeError: ") and f"rewards_of_tests.py, line {line + 2}" in by_name["deep"]
    )
    assert by_name["exit"].startswith(": SystemExit: 3 (rewards_of_tests.py")
    assert by_name["none"] == " gave None: give a number, or a dict of numbers"
    assert by_name["nan"] == " gave nan: give a finite number"
    assert by_name["huge"] == " gave -inf: give a finite number" and by_name["fraction"].startswith(" gave inf")
    assert by_name["decimal"] == " gave Decimal('0.5'): give a number, or a dict of numbers"
    assert by_name["nested"] == " gave {'b': 1.0} as 'a': give a number, or a dict of numbers"


def test_an_async_function_that_raises_is_told_by_its_own_line(folder):
    [given] = score(folder, config("raises"), "x")
    assert given.status == "infra_error" and "KeyError: 'no such thing' (rewards_of_tests.py, line" in given.message


@pytest.mark.parametrize("reward", ["any_fault", "hangs"])
def test_a_function_that_hangs_is_a_timeout_and_the_rest_is_scored(folder, reward):
    start = time.perf_counter()
    scores = score(folder, config(reward), "a", "hang", "b", timeout=0.7)
    assert [(s.status, s.reward) for s in scores] == [("ok", 1.0), ("timeout", 0.0), ("ok", 1.0)]
    assert "0.7 s" in scores[1].message and time.perf_counter() - start < 15


def test_a_pattern_that_backtracks_for_ever_is_a_timeout_and_the_rest_is_scored(folder):
    """It never leaves the engine of regular expressions, of which it takes 2**60 steps."""
    scores = score(folder, config("backtracks"), "aaa", "a" * 60 + "b", "b", timeout=0.7)
    assert [(s.status, s.reward) for s in scores] == [("ok", 1.0), ("timeout", 0.0), ("ok", 0.0)]


def test_a_scorer_that_cannot_find_the_function_says_so(folder):
    async def run():
        scorer = Scorer(config("corect"), [str(folder)], 5.0, 4)
        try:
            await scorer.start()
        finally:
            await scorer.stop()

    with pytest.raises(RuntimeError, match="did not start: .*there is no 'corect' in .* did you mean 'correct'?"):
        asyncio.run(run())


def test_the_failure_is_in_the_error_of_an_evaluation(folder):
    """Through a real scorer and an episode, to the error that ends an evaluation."""
    from titan_rl.controller.loop.evaluate import evaluate

    task, tokenizer = config("raises"), character_tokenizer()
    made = make_task(task, [str(folder)])

    async def ask(request):
        return [Completion(np.array([5]), np.zeros(1), np.zeros(1), "stop") for _ in request.seeds]

    async def run():
        scorer = Scorer(task, [str(folder)], 5.0, 4)

        async def group(prompt, sampling):
            parts = dict(
                task=made, tokenizer=tokenizer, ask=ask, score=scorer.score, sampling=sampling, seed=1, step_timeout=60
            )
            groups.append(await run_group(prompt, **parts))
            return groups[-1]

        try:
            meshes = SimpleNamespace(
                max_tokens=64, dispatcher=SimpleNamespace(run_group=group, faults=ConsecutiveFailures())
            )
            await evaluate(
                meshes, held_out_prompts(made, 2), Config(rollout=RolloutConfig(max_new_tokens=8, max_retries=0))
            )
        finally:
            await scorer.stop()

    groups = []
    place = r"rewards_of_tests:raises: KeyError: 'no such thing' \(rewards_of_tests.py, line \d+\)"
    with pytest.raises(RuntimeError, match=rf"^2 held-out answers .* the first is that to q.jsonl line \d+: {place}$"):
        asyncio.run(run())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 2 and all("no such thing" in rollout.failure for rollout in rollouts)


def test_held_out_answers_that_could_not_be_scored_in_time_are_counted():
    from titan_rl.controller.loop.evaluate import evaluate

    async def late(prompt, sampling):
        status = "ok" if prompt.id == "held_out/1" else "timeout"
        return Group(prompt.id, [rollout_of(prompt.id, 0, status=status, reward=float(status == "ok"))])

    async def no_statistics():
        return []

    async def run():
        dispatcher = SimpleNamespace(run_group=late, faults=ConsecutiveFailures())
        meshes = SimpleNamespace(max_tokens=64, dispatcher=dispatcher, take_statistics=no_statistics)
        return await evaluate(meshes, [Prompt(f"held_out/{n}", "", "", {}) for n in range(3)], Config())

    assert asyncio.run(run()) == Proportion(1, 3, num_timeouts=2)


# before anything starts


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("rewards_of_testz:correct", ["task.reward = 'rewards_of_testz:correct'", "there is no module"]),
        ("rewards_of_tests:corect", ["there is no 'corect'", "did you mean 'correct'?"]),
        ("rewards_of_tests", ["is no reward", "known: gsm8k", "task; or give a function of yours, 'module:name'"]),
        ("rw.raises", ["is no reward: did you mean 'rw:raises'?"]),
        ("rw.py:raises", ["give rw:raises"]),
        ("taks", ["is no reward: did you mean 'task'? Else give a function of yours, 'module:name'"]),
        ("rewards_of_tests:two", ["must take (prompt, completion, row), but it takes (prompt, completion)"]),
        ("rewards_of_tests:compute_at", ["takes 'url'", "data_source, solution_str, ground_truth, extra_info"]),
        ("rewards_of_tests:of_trl", ["takes 'prompts' where it is given the prompt"]),
        ("rewards_of_tests:of_openrlhf", ["takes 'queries' where it is given the prompt"]),
        ("rewards_of_tests:swapped", ["takes 'completion' where it is given the prompt"]),
        ("rewards_of_tests:of_answer", ["takes 'ground_truth' where it is given the row", "row['answer']"]),
        ("rewards_of_tests:NUMBER", ["is of type int: name a function (prompt, completion, row)"]),
        ("broken_rewards_of_tests:x", ["ZeroDivisionError", "broken_rewards_of_tests.py, line 2"]),
    ],
)
def test_a_mistake_in_the_name_or_the_function_is_one_line(folder, reference, words):
    with pytest.raises(ConfigError) as caught:
        make_task(config("") if not reference else TaskConfig(name="gcd", reward=reference), [str(folder)])
    [line] = str(caught.value).splitlines()
    assert all(word in line for word in words), line


def test_task_is_the_tasks_own_score_by_that_name_too():
    """As in ``task.rewards`` and for ``eval.grader``."""
    named, plain = (make_task(TaskConfig(name="gcd", reward=reward)) for reward in ("task", ""))
    prompt = plain.prompt("train", 1, 0)
    assert type(named) is type(plain) and named.score(prompt, [prompt.answer]) == {"exact": 1.0}


def test_a_rewarded_task_is_otherwise_the_task(folder):
    plain = make_task(TaskConfig(name="jsonl", options={"file": "q.jsonl"}), [str(folder)])
    rewarded = make_task(config("correct"), [str(folder)])
    assert rewarded.size == plain.size and held_out_prompts(rewarded, 9) == held_out_prompts(plain, 9)
    prompts = list(islice(PromptStream(rewarded, 1), 30))
    assert prompts == list(islice(PromptStream(plain, 1), 30))
    assert rewarded.messages(prompts[0]) == prompts[0].text and rewarded.demonstration(prompts[0]) == prompts[0].answer


def test_numbers_of_all_kinds_count():
    for value in (1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)):
        assert as_parts("f", value) == {"reward": 1.0}
        assert as_parts("f", {"a": value}) == {"a": 1.0}
    with pytest.raises(UserCodeError, match="^f gave .*\\.\\.\\.: give a number"):
        as_parts("f", "x" * 1000)
