"""What an episode is played in: started, asked and let go of, whatever happens; its failures are never a reward."""

import asyncio
import threading

import numpy as np
import pytest

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Completion, Prompt, Provenance, Sampling
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces import task as tasks
from titan_rl.environments.interfaces.environment import OVER, EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.rollout import group as rollout_group
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.models.builtin.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id


class Counting(OneAnswer):
    """Wants three answers, each of which earns its length over ten."""

    def __init__(self, log: list[str]):
        self.log, self.num_answers = log, 0

    async def reset(self):
        self.log.append("reset")

    async def step(self, answer):
        self.num_answers += 1
        if self.num_answers == 3:
            return Reply(reward=len(answer) / 10)
        return Reply([{"role": "user", "content": f"{self.num_answers}?"}], reward=len(answer) / 10)

    async def close(self):
        self.log.append("close")


class Task(tasks.Task):
    tools = ()

    def __init__(self, make=Counting):
        self.make, self.log = make, []

    def messages(self, prompt):
        return prompt.text

    def environment(self, prompt):
        return self.make(self.log)


def play(task: Task, *answers: str, num_samples: int = 1, step_timeout: float = 60, ask=None, max_turns: int = 9):
    """The group of a model that gives these answers, whoever asks."""
    said = iter(answers or ["1"] * 100)

    async def answer(request):
        texts = [next(said) for _ in request.seeds]
        tokens = [np.array([*TOKENIZER.encode(text), EOS], np.int32) for text in texts]
        return [Completion(t, np.full(len(t), -0.5), np.zeros(len(t)), "stop") for t in tokens]

    async def score(prompt, rollouts):
        return [Score("ok", {"right": 1.0})] * len(rollouts), 0.0

    parts = dict(
        tokenizer=TOKENIZER, ask=ask or answer, score=score, sampling=Sampling(num_samples, 8, 1.0, 64, max_turns)
    )
    prompt = Prompt("train/0000001", "4,6=", "2", {})
    return asyncio.run(rollout_group.run_group(prompt, task=task, seed=1, step_timeout=step_timeout, **parts))


def test_others_go_on_while_images_are_decoded(monkeypatch):
    """An image that cannot be read is found when another coroutine had its turn."""
    had_turn = threading.Event()

    def decode(tokenizer, images):
        raise ConfigError(f"its image is broken: {images}, {had_turn.wait(60)}")

    monkeypatch.setattr(rollout_group, "decode_images", decode)
    prompt = Prompt("p", "what?", "", {}, images=(b"broken",))
    parts = dict(tokenizer=TOKENIZER, ask=None, score=None, sampling=Sampling(2, 8, 1.0, 64, 1))

    async def both():
        playing = asyncio.create_task(rollout_group.run_group(prompt, task=Task(), seed=1, step_timeout=60, **parts))
        await asyncio.sleep(0)
        had_turn.set()
        return await playing

    failed = asyncio.run(both())
    assert {rollout.status for rollout in failed.rollouts} == {"infra_error"}
    assert "its image is broken: (b'broken',), True" in str(failed.rollouts[0])


def test_each_sample_has_one_of_its_own_which_is_let_go_of():
    group = play(task := Task(), num_samples=2)
    assert sorted(task.log) == ["close", "close", "reset", "reset"]
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]


def test_what_it_pays_for_an_answer_is_that_turns_reward():
    [rollout] = play(Task(), "a", "bb", "ccc").rollouts
    assert rollout.turn_rewards == [0.1, 0.2, 0.3] and rollout.reward == pytest.approx(1.6)
    assert rollout.reward_parts == {"right": 1.0, "environment": pytest.approx(0.6)}
    assert TOKENIZER.decode(rollout.tokens) == "4,6=a<eos>1?bb<eos>2?ccc<eos>"
    assert TOKENIZER.decode(rollout.tokens[rollout.provenance == Provenance.TOOL]) == "1?2?"


def test_an_episode_ends_with_its_turns():
    [rollout] = play(task := Task(), "a", "bb", "ccc", max_turns=2).rollouts
    assert [len(rollout.turns), rollout.status, rollout.turn_rewards] == [2, "max_turns", [0.1, 0.2]]
    assert TOKENIZER.decode(rollout.tokens) == "4,6=a<eos>1?bb<eos>" and task.log[-1] == "close"
    [whole] = play(Task(), "a", "bb", "ccc", max_turns=3).rollouts
    assert (len(whole.turns), whole.status) == (3, "ok")


class Opens(Counting):
    """Each sample hears another number first, unless it is told which."""

    def __init__(self, log, said=None):
        super().__init__(log)
        self.said = said

    async def reset(self):
        await super().reset()
        return Reply([{"role": "user", "content": self.said or f"no. {len(self.log)}: "}])


class SpeaksFirst(Task):
    speaks_first = True


def test_what_it_says_first_is_behind_the_prompt_and_each_sample_has_its_own():
    group = play(SpeaksFirst(Opens), num_samples=2)
    texts = [TOKENIZER.decode(rollout.tokens) for rollout in group.rollouts]
    assert texts == [f"4,6=no. {number}: 1<eos>1?1<eos>2?1<eos>" for number in (1, 2)]
    for number, rollout in enumerate(group.rollouts, 1):
        said = rollout.tokens[rollout.provenance == Provenance.TOOL]
        assert TOKENIZER.decode(said) == f"no. {number}: 1?2?" and len(rollout.turns) == 3
        written = rollout.provenance == Provenance.MODEL
        assert np.all(rollout.logprobs[written] == -0.5) and not rollout.logprobs[~written].any()
        assert rollout.text.startswith(f"> no. {number}:\n1\n> 1?")


def test_those_that_say_nothing_first_begin_with_one_request_and_the_others_with_one_a_sample():
    def asked(task: Task) -> list[int]:
        sizes = []

        async def ask(request):
            sizes.append(len(request.seeds))
            tokens = np.array([5, EOS], np.int32)
            return [Completion(tokens, np.zeros(2), np.zeros(2), "stop")] * len(request.seeds)

        play(task, ask=ask, num_samples=3)
        return sizes

    assert asked(Task())[0] == 3 and max(asked(SpeaksFirst(Opens))) == 1
    seeds = []

    async def ask(request):
        seeds.extend(request.seeds)
        return [Completion(np.array([EOS]), np.zeros(1), np.zeros(1), "stop")] * len(request.seeds)

    play(Task(OneAnswerEach), ask=ask, num_samples=3)
    alone, seeds[:] = sorted(seeds), []
    play(SpeaksFirst(OneAnswerEach), ask=ask, num_samples=3)
    assert sorted(seeds) == alone, "a sample's seed is its own, however it is asked"


def test_a_worked_example_begins_with_what_the_environment_says_first():
    class Shown(SpeaksFirst):
        def demonstration(self, prompt):
            return ["a", "b"]

    rollout = asyncio.run(demonstrate(Prompt("train/0000001", "4,6=", "2", {}), task := Shown(Opens), TOKENIZER, 60))
    assert TOKENIZER.decode(rollout.tokens) == "4,6=no. 1: a<eos>1?b<eos>" and task.log == ["reset", "close"]
    learned = rollout.tokens[rollout.provenance == Provenance.MODEL]
    assert TOKENIZER.decode(learned) == "a<eos>b<eos>"


class OneAnswerEach(OneAnswer):
    def __init__(self, log):
        pass


class SaysTooMuch(Opens):
    def __init__(self, log):
        super().__init__(log, said="x" * 60)


def test_first_words_that_leave_no_room_refuse_the_prompt_and_let_go_of_all():
    group = play(task := SpeaksFirst(SaysTooMuch), num_samples=3)
    assert group.refused == "prompt_too_long" and not group.rollouts
    assert task.log.count("close") == task.log.count("reset")


class SaysNumber(Counting):
    async def reset(self):
        return 4


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(Opens), "its task must say speaks_first = True"),
        (Task(SaysNumber), "an environment's reset gave 4: give a Reply, or None"),
        (SpeaksFirst(SaysNumber), "an environment's reset gave 4: give a Reply, or None"),
    ],
)
def test_a_reset_that_gives_what_nobody_expects_is_told(task, words):
    [rollout] = play(task).rollouts
    assert rollout.status == "infra_error" and words in rollout.failure and task.log.count("close") == 1


def test_one_that_fails_at_its_reset_before_any_answer_is_told_and_has_no_reward():
    [rollout] = play(task := SpeaksFirst(BreaksToBegin)).rollouts
    assert (rollout.status, rollout.reward, rollout.turns) == ("infra_error", 0.0, [])
    assert TOKENIZER.decode(rollout.tokens) == "4,6=" and task.log == ["close"]


def test_episodes_wait_for_their_turn():
    class Busy(Counting):
        under_way = most = 0

        async def reset(self):
            Busy.under_way += 1
            Busy.most = max(Busy.most, Busy.under_way)
            await asyncio.sleep(0.01)

        async def close(self):
            Busy.under_way -= 1

    class Few(Task):
        sessions = Sessions(2, 5.0)

    group = play(Few(Busy), num_samples=6)
    assert Busy.most == 2 and [rollout.status for rollout in group.rollouts] == ["ok"] * 6


class Misspelled(OneAnswer):
    async def steps(self, answer):
        return OVER


def test_a_misspelled_method_of_an_environment_is_told():
    [rollout] = play(Task(lambda log: Misspelled())).rollouts
    assert rollout.status == "infra_error" and "Misspelled with steps" in rollout.failure
    assert "did you mean 'step'?" in rollout.failure


class SlowToReply(Counting):
    async def step(self, answer):
        await asyncio.sleep(60)


class SlowToClose(Counting):
    async def close(self):
        await asyncio.sleep(60)


class Breaks(Counting):
    async def step(self, answer):
        raise ValueError("the board is gone")


class BreaksAtOnce(Counting):
    def step(self, answer):
        raise ValueError("no coroutine yet")


class SaysText(Counting):
    async def step(self, answer):
        return "go on"


class SpeaksForTheModel(Counting):
    async def step(self, answer):
        return Reply([{"role": "assistant", "content": "2"}])


class PaysNothingThatCounts(Counting):
    async def step(self, answer):
        return Reply(reward=float("nan"))


class PaysMoreThanAFloatHolds(Counting):
    async def step(self, answer):
        return Reply(reward=10**400)


class PaysInText(Counting):
    async def step(self, answer):
        return Reply(reward="1.0")


class NoEnvironment:
    def __init__(self, log):
        log.append("close")


class BreaksToBegin(Counting):
    async def reset(self):
        raise EnvironmentFailed("the server is gone")


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (SlowToReply, "timeout", ["SlowToReply.step in an episode of train/0000001", "0.2 s"]),
        (SlowToClose, "timeout", ["SlowToClose.close in an episode of train/0000001", "0.2 s"]),
        (Breaks, "infra_error", ["Breaks.step: ValueError: the board is gone", "test_environments.py, line"]),
        (BreaksAtOnce, "infra_error", ["BreaksAtOnce.step: ValueError: no coroutine yet"]),
        (SaysText, "infra_error", ["SaysText.step gave 'go on': give a Reply"]),
        (SpeaksForTheModel, "infra_error", ["SpeaksForTheModel.step: ValueError: a reply's messages are"]),
        (PaysNothingThatCounts, "infra_error", ["a reply has the reward nan: give a finite number"]),
        (PaysMoreThanAFloatHolds, "infra_error", ["a reply has the reward 1000", "give a finite number"]),
        (PaysInText, "infra_error", ["a reply has the reward '1.0': give a finite number"]),
        (NoEnvironment, "infra_error", ["NoEnvironment.close: AttributeError"]),
        (BreaksToBegin, "infra_error", ["the server is gone"]),
    ],
)
def test_one_that_fails_is_never_a_reward(make, status, words):
    [rollout] = play(task := Task(make), step_timeout=0.2).rollouts
    assert (rollout.status, rollout.reward, rollout.reward_parts, rollout.turn_rewards) == (status, 0.0, {}, [])
    assert all(word in rollout.failure for word in words), rollout.failure
    assert "close" in task.log or make is SlowToClose


def test_when_the_generator_fails_every_one_is_let_go_of():
    class Gone(RuntimeError):
        pass

    async def ask(request):
        if len(request.seeds) == 1:
            raise Gone
        tokens = np.array([5, EOS], np.int32)
        return [Completion(tokens, np.zeros(2), np.zeros(2), "stop")] * len(request.seeds)

    task = Task()
    with pytest.raises(Gone):
        play(task, ask=ask, num_samples=3)
    assert task.log.count("close") == task.log.count("reset") == 3


def test_slow_replies_are_waited_for_side_by_side():
    class Waits(Counting):
        together = 0
        most = 0

        async def step(self, answer):
            Waits.together += 1
            Waits.most = max(Waits.most, Waits.together)
            await asyncio.sleep(0.05)
            Waits.together -= 1
            return OVER

    play(Task(Waits), num_samples=4)
    assert Waits.most == 4
