"""What may be asked, what an answer earns, and a scorer that no answer can hang, kill or deceive."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from reasoning_gym.factory import ProceduralDataset
from tree import TREE
from waiting import eventually

from titan_rl.compat.reasoning_gym import families
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.reasoning_gym.families import COMPACT, PAYS_FOR_NOTHING, has_own_scorer, usable_families
from titan_rl.environments.registry import Task, correct, make_task
from titan_rl.environments.scoring.scorer import Scorer

PROMPT = Prompt("train/0000000", "", "", {})
DETERMINISTIC = [
    *sorted(COMPACT),
    "base_conversion",
    "basic_arithmetic",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "coin_flip",
    "complex_arithmetic",
    "letter_counting",
    "number_sorting",
    "prime_factorization",
]


def make_gym(name: str, style: str, options: dict) -> Task:
    return make_task(TaskConfig(name=name, style=style, options=options))


def refusal(name: str, style: str = "chat", **options) -> str:
    with pytest.raises(ConfigError) as caught:
        make_gym(name, style, options)
    [line] = str(caught.value).splitlines()
    return line


# families


PARTS = """
import sys

from titan_rl.compat.reasoning_gym import create_dataset, family, part

assert create_dataset("gcd", seed=1, size=3)[2]["answer"]
assert part("data.wordle_words").wordle_words
assert not {"sympy", "matplotlib", "reasoning_gym.logic"} & sys.modules.keys(), "others' parts"

import reasoning_gym  # a user's

assert reasoning_gym.factory.DATASETS["gcd"] is family("gcd") and reasoning_gym.logic and reasoning_gym.__version__
assert "sympy" in sys.modules and "matplotlib" not in sys.modules
assert family("acre"), "whose file is not named like it"
"""
BESIDE_A_USERS_IMPORT = """
from threading import Thread

import titan_rl.compat.reasoning_gym as parts


def user():
    import reasoning_gym
    assert reasoning_gym.create_dataset("gcd", seed=1, size=1)[0]


def ours():
    found.append(len(parts.families()))


found = []
threads = [Thread(target=user), Thread(target=ours)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found and found[0] > 90, "all of them, though another thread was importing them"
"""
SHARED_BY_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from titan_rl.compat.reasoning_gym import part

assert part("data.wordle_words").wordle_words
import reasoning_gym

together = Barrier(4)


def ask(name):
    together.wait()
    return getattr(reasoning_gym, name)


with ThreadPoolExecutor(4) as threads:  # a star asks for __all__
    assert all(threads.map(ask, ["__all__", "logic", "__version__", "create_dataset"]))
"""


AS_A_USERS_IMPORT_BEGINS = """
import sys
import time
from threading import Thread
from types import SimpleNamespace

import titan_rl.compat.reasoning_gym as parts


def user():
    import reasoning_gym
    assert reasoning_gym.create_dataset("gcd", seed=1, size=1)[0]
    found.append(reasoning_gym)


def find_spec(*arguments):
    thread.start()
    time.sleep(0.5)
    return find(*arguments)


found, thread, find = [], Thread(target=user), parts.PathFinder.find_spec
parts.PathFinder = SimpleNamespace(find_spec=find_spec)
assert len(parts.families()) > 90
thread.join()
assert found == [sys.modules["reasoning_gym"]], "one package for both, or each may wait for a part that the other holds"
"""


@pytest.mark.parametrize(
    "program",
    [PARTS, BESIDE_A_USERS_IMPORT, SHARED_BY_THREADS, AS_A_USERS_IMPORT_BEGINS],
    ids=["parts", "a user's import", "threads", "as a user's begins"],
)
def test_a_family_is_imported_with_its_category_alone(program):
    """And the package is whole for whoever asks for it afterwards."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_all_families_can_be_had_but_the_one_that_is_a_mixture():
    known = families()
    assert set(known) - set(usable_families()) == {"composite"}
    scored = {name: known[name][0].score_answer is not ProceduralDataset.score_answer for name in usable_families()}
    assert scored == {name: has_own_scorer(name) for name in usable_families()}
    assert "task.name = 'mixture'" in refusal("composite")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(name="gdc"), ["task.name", "'gcd'"]),
        (dict(name="composite"), ["task.name"]),
        (dict(name="letter_counting", style="compact"), ["task.style", "'chat'", "gcd"]),
        (dict(name="gcd", max_vale=3), ["task.options.max_vale", "'max_value'"]),
        (dict(name="gcd", seed=3), ["task.options.seed"]),
        (dict(name="gcd", size=3), ["task.options.size"]),
        (dict(name="gcd", max_value="many"), ["task.options"]),
        (dict(name="gcd", min_value=5, max_value=2), ["task.options", "max_value"]),
        (dict(name="gcd", shots=-1), ["task.options.shots"]),
        (dict(name="gcd", shots="two"), ["task.options.shots"]),
    ],
)
def test_mistakes_are_told_with_the_mend(arguments, words):
    line = refusal(**arguments)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("name", "style"), [(name, "chat") for name in DETERMINISTIC] + [(name, "compact") for name in sorted(COMPACT)]
)
def test_own_answer_earns_the_full_score_and_nothing_else_does(name, style):
    task = make_gym(name, style, {})
    for index in range(5):
        prompt = task.prompt("train", 3, index)
        demonstrated = sum(task.score(prompt, [task.demonstration(prompt)]).values())
        assert correct(demonstrated) and demonstrated <= 1
        for answer in ("", "no idea", "nan"):
            assert sum(task.score(prompt, [answer]).values()) < 0.5, (prompt.answer, answer)


@pytest.mark.parametrize("name", sorted(PAYS_FOR_NOTHING))
def test_guarded_families_pay_for_the_exact_answer_alone(name):
    task = make_gym(name, "chat", {})
    for index in range(10):
        prompt = task.prompt("train", 3, index)
        for answer in ("", "nan", "0", "inf", "nan+nanj", "True or False", "heads tails", "x", prompt.answer + "."):
            assert answer == prompt.answer or not any(task.score(prompt, [answer]).values())
        assert correct(sum(task.score(prompt, [f" {prompt.answer}\n"]).values()))


def test_compact_answers_are_exact():
    task = make_gym("gcd", "compact", {})
    prompt = task.prompt("train", 3, 0)
    for answer in (f"{prompt.answer} ", f"{prompt.answer}\n"):
        assert correct(sum(task.score(prompt, [answer]).values()))
    for answer in ("1 2 3 4 5 6 7 8 9", f"0{prompt.answer}", f"{prompt.answer}.0", ""):
        assert not any(task.score(prompt, [answer]).values())


def test_latest_answer_counts():
    task = make_gym("gcd", "compact", {})
    prompt = task.prompt("train", 3, 0)
    assert correct(sum(task.score(prompt, ["0", prompt.answer]).values()))
    assert not any(task.score(prompt, [prompt.answer, "0"]).values())


@pytest.mark.parametrize("name", sorted(COMPACT))
def test_prompts_are_the_same_in_every_process_and_compact_ones_are_short(name):
    one, two = (make_gym(name, "compact", {}) for _ in range(2))
    later = [one.prompt("train", 5, index) for index in (9, 3, 0)]
    assert [two.prompt("train", 5, index) for index in (0, 3, 9)] == later[::-1]
    assert len({one.prompt("train", seed, 0).text for seed in range(8)}) > 1
    for prompt in later:
        assert prompt.text.endswith("=") and " " not in prompt.text and len(prompt.text) < 60
        assert one.messages(prompt) == prompt.text


def test_shots_are_worked_examples_before_the_question():
    task = make_gym("letter_counting", "chat", {"shots": 2})
    prompt = task.prompt("train", 3, 0)
    messages = task.messages(prompt)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[-1]["content"] == prompt.text
    assert len({message["content"] for message in messages[::2]}) == 3
    assert task.messages(task.prompt("train", 3, 1))[:4] == messages[:4]


def test_a_system_prompt_comes_first():
    task = make_task(TaskConfig(name="letter_counting", style="chat", system_prompt="Count.", options={"shots": 1}))
    roles = [(m["role"], m["content"] == "Count.") for m in task.messages(task.prompt("train", 3, 0))]
    assert roles == [("system", True), ("user", False), ("assistant", False), ("user", False)]


# the scorer process

FAKE_TASK = """
import os, sys, time, types

class ReasoningGymTask:
    def __init__(self, task):
        pass

    def prepare_scoring(self):
        pass

    def score(self, prompt, answers):
        answer = answers[-1]
        if answer == "hang":
            time.sleep(1000)
        if answer == "nap":
            time.sleep(0.5)
        if answer == "compute":
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
        if answer in ("pid", "nap", "compute"):
            return {"score": os.getpid()}
        if answer == "die":
            os._exit(1)
        if answer == "print":
            print('{"status": "ok", "parts": {"score": 99.0}, "message": ""}', flush=True)
            return {"score": 0.5}
        if answer == "raise":
            raise ValueError("tripped")
        if answer == "raise at length":
            raise ValueError("x" * 100_000)
        return {"score": float(answer)}

module = types.ModuleType("titan_rl.environments.reasoning_gym.task")
module.ReasoningGymTask = ReasoningGymTask
sys.modules[module.__name__] = module
"""


@pytest.fixture
def fake_task(tmp_path, monkeypatch):
    """Scorer processes of this test score by FAKE_TASK."""
    (tmp_path / "sitecustomize.py").write_text(FAKE_TASK)
    root = TREE
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]))


def with_scorer(use, timeout: float = 20.0, at_once: int = 4, **task):
    """What ``await use(scorer)`` gives; no process is left behind."""

    async def run():
        scorer = Scorer(TaskConfig(**task), [], timeout, at_once)
        try:
            return await asyncio.wait_for(use(scorer), 60)
        finally:
            await scorer.stop()

    return asyncio.run(run())


def outcomes(scores) -> list[tuple[str, float]]:
    return [(score.status, score.reward) for score in scores]


def score_all(*answers: str, timeout: float = 20.0, at_once: int = 4):
    async def use(scorer):
        scores, _ = await scorer.score(PROMPT, [[answer] for answer in answers])
        return scores

    return with_scorer(use, timeout, at_once)


def test_real_task_is_scored_in_another_process():
    prompt = make_gym("gcd", "compact", {}).prompt("train", 3, 0)

    async def use(scorer):
        await scorer.start()
        pid = scorer.process.pid
        first = await scorer.score(prompt, [[prompt.answer], ["wrong"]])
        second = await scorer.score(prompt, [["wrong"], ["0", prompt.answer]])
        return pid, scorer.process.pid, first, second

    pid, same_pid, (first, seconds), (second, _) = with_scorer(use)
    assert pid == same_pid != os.getpid() and 0 < seconds < 20
    assert outcomes(first) == [("ok", 1.0), ("ok", 0.0)]
    assert outcomes(second) == [("ok", 0.0), ("ok", 1.0)]


def test_answer_that_hangs_is_a_timeout_and_the_rest_is_scored(fake_task):
    start = time.perf_counter()
    scores = score_all("1", "hang", "2", "hang", "3", timeout=0.7)
    assert outcomes(scores) == [("ok", 1), ("timeout", 0), ("ok", 2), ("timeout", 0), ("ok", 3)]
    assert "0.7 s" in scores[1].message and time.perf_counter() - start < 10


def test_answer_that_kills_its_scorer_is_a_failure_of_the_machinery(fake_task):
    scores = score_all("1", "die", "die", "2")
    assert outcomes(scores) == [("ok", 1), ("infra_error", 0), ("infra_error", 0), ("ok", 2)]


def test_a_stopped_scorer_is_a_failure_of_the_machinery_and_replaced(fake_task):
    """No answer can do that, so none may be charged with it; and it is seen long before the deadline."""

    async def use(scorer):
        await scorer.start()
        stopped = scorer.process.pid
        os.kill(stopped, signal.SIGSTOP)
        start = time.monotonic()
        scores, _ = await scorer.score(PROMPT, [["1"], ["1"]])
        return stopped, scorer.process.pid, scores, time.monotonic() - start

    stopped, pid, scores, seconds = with_scorer(use, timeout=60.0)
    assert pid != stopped and not os.path.exists(f"/proc/{stopped}") and seconds < 30
    assert outcomes(scores) == [("ok", 1), ("ok", 1)]


def test_a_stopped_worker_is_a_failure_of_the_machinery_and_replaced(fake_task):
    async def use(scorer):
        [first] = (await scorer.score(PROMPT, [["pid"]]))[0]
        os.kill(int(first.reward), signal.SIGSTOP)
        start = time.monotonic()
        scores, _ = await scorer.score(PROMPT, [["1"]])
        [other] = (await scorer.score(PROMPT, [["pid"]]))[0]
        return first, other, scores, time.monotonic() - start

    first, other, [score], seconds = with_scorer(use, timeout=60.0)
    assert score.status == "infra_error" and "stopped by a signal" in score.message and seconds < 30
    assert other.reward != first.reward and not os.path.exists(f"/proc/{first.reward:.0f}")


def test_scores_that_wait_are_had_side_by_side(fake_task):
    """One that ends early takes another, so there are fewer processes than answers where forks are slow."""
    start = time.perf_counter()
    scores = score_all(*["nap"] * 32, at_once=32)
    assert len({score.reward for score in scores}) > 8 and time.perf_counter() - start < 8 < 32 * 0.5


@pytest.mark.waits
def test_the_wait_for_a_place_takes_nothing_off_the_deadline(fake_task):
    """Ten answers of half a second one after the other: the last waits for longer than its deadline, and is scored."""
    scores = score_all(*["nap"] * 10, timeout=3.0, at_once=1)
    assert {score.status for score in scores} == {"ok"}


def test_scores_that_compute_keep_to_the_cores(fake_task):
    """Else each would come too late for the others' sake."""
    scores = score_all(*["compute"] * 24, at_once=24)
    assert len({score.reward for score in scores}) <= len(os.sched_getaffinity(0)) + 1


def test_no_more_are_scored_at_once_than_was_asked(fake_task):
    assert len({score.reward for score in score_all(*["nap"] * 6, at_once=2)}) == 2


@pytest.mark.parametrize("end", ["hang up", "kill"])
def test_nothing_outlives_a_scorer(fake_task, end):
    """Not even an answer that hangs, and whether its verifier or itself died."""
    arguments = [json.dumps(asdict(TaskConfig())), "[]", "[]", "60", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_rl.environments.scoring.scorer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b'"ready"\n'
        request = {"prompt": asdict(PROMPT), "answers": ["hang"]}
        process.stdin.write(f"1 {json.dumps(request)}\n".encode())
        process.stdin.flush()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert comes_true(lambda: children.read_text().split())
        [worker] = children.read_text().split()
        if end == "kill":
            process.kill()
        process.stdin.close()
        process.wait(60)
        assert comes_true(lambda: not Path(f"/proc/{worker}").exists())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def comes_true(holds, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (result := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(result)


def test_answer_that_a_scorer_trips_over_is_told_by_name(fake_task):
    scores = score_all("raise", "2")
    assert outcomes(scores) == [("infra_error", 0), ("ok", 2)]
    assert scores[0].message == "ValueError: tripped"


def test_complaints_of_any_length_are_heard(fake_task):
    assert outcomes(score_all("1", "raise at length", "2")) == [("ok", 1), ("infra_error", 0), ("ok", 2)]


def test_what_a_scorer_prints_is_not_a_score(fake_task):
    assert outcomes(score_all("print", "1", "print")) == [("ok", 0.5), ("ok", 1), ("ok", 0.5)]


@pytest.mark.parametrize("answer", ["nan", "inf", "-inf"])
def test_score_that_is_no_number_is_no_reward(fake_task, answer):
    [score] = score_all(answer)
    assert score.status == "infra_error" and math.isfinite(score.reward)


def test_a_scorer_that_dies_while_it_is_idle_is_replaced_at_once(fake_task):
    """And no answer is charged with it, however soon the next one comes."""

    async def use(scorer):
        await scorer.start()
        os.kill((first := scorer.process).pid, signal.SIGKILL)
        await first.wait()
        at_once = await scorer.score(PROMPT, [["1"]])
        os.kill((second := scorer.process).pid, signal.SIGKILL)
        await eventually(lambda: scorer.process not in (None, second), "the next scorer process", seconds=60)
        return outcomes(at_once[0]), outcomes((await scorer.score(PROMPT, [["2"]]))[0])

    assert with_scorer(use) == ([("ok", 1)], [("ok", 2)])


def test_scores_that_nobody_waited_for_are_not_given_to_the_next(fake_task):
    async def use(scorer):
        await scorer.start()
        os.kill(pid := scorer.process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.score(PROMPT, [["10"], ["20"]]), 0.2)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return (await scorer.score(PROMPT, [["7"], ["8"]]))[0]

    assert outcomes(with_scorer(use)) == [("ok", 7), ("ok", 8)]


def test_a_closed_scorer_starts_no_process_for_those_who_still_wait(fake_task):
    async def use(scorer):
        await scorer.start()
        waiting = asyncio.create_task(scorer.score(PROMPT, [["hang"], ["1"]]))
        await asyncio.sleep(0.2)
        await scorer.close()
        with pytest.raises(RuntimeError, match="was closed"):
            await waiting
        with pytest.raises(RuntimeError, match="was closed"):
            await scorer.score(PROMPT, [["2"]])
        return scorer.process

    assert with_scorer(use) is None


def test_callers_take_turns(fake_task):
    async def use(scorer):
        calls = (scorer.score(PROMPT, [[str(n)], [str(n + 0.5)]]) for n in range(8))
        return [outcomes(scores) for scores, _ in await asyncio.gather(*calls)]

    assert with_scorer(use) == [[("ok", n), ("ok", n + 0.5)] for n in range(8)]


def test_scorer_that_cannot_start_says_so():
    async def use(scorer):
        await scorer.start()

    with pytest.raises(RuntimeError, match="no_such_task"):
        with_scorer(use, name="no_such_task")


def test_scorer_sees_no_secrets_of_its_parent(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")

    async def use(scorer):
        await scorer.start()
        return Path(f"/proc/{scorer.process.pid}/environ").read_bytes()

    assert b"SECRET_OF_THE_PARENT" not in with_scorer(use)
