"""Prompts become rollouts: tokens stay as they were sampled. A fake generator and a fake task, a real tokenizer."""

import asyncio

import numpy as np
import pytest

from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.types import Completion, Prompt, Provenance, Request, Rollout, Sampling
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.interfaces.environment import OneAnswer, Replying
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.environments.rollout.group import encode_prompt, run_group
from titan_rl.models.builtin.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = Prompt("train/0000007", "4,6=", "2", {})


class OneTurn(Task):
    tools = ()

    def messages(self, prompt):
        return prompt.text

    def demonstration(self, prompt):
        return prompt.answer

    def environment(self, prompt):
        return OneAnswer()


class AsksAgain(OneTurn):
    """Replies once to each answer but ``ok``."""

    def environment(self, prompt):
        return Replying(lambda answers: "again:" if len(answers) == 1 and answers[0] != "ok" else None)


class Generator:
    """Answers in turn from a list, or with the seed's last digit, and remembers what it was asked."""

    def __init__(self, *answers: str, stop_reason: str = "stop"):
        self.answers, self.stop_reason = list(answers), stop_reason
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        return [self._complete(seed, self.answers.pop(0) if self.answers else str(seed % 10)) for seed in request.seeds]

    def _complete(self, seed: int, text: str) -> Completion:
        tokens = np.array([*TOKENIZER.encode(text, add_special_tokens=False), EOS], np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        return Completion(tokens, logprobs, np.arange(3, 3 + len(tokens), dtype=np.int32), self.stop_reason)


async def score_by_length(prompt, rollouts):
    return [Score("ok", {"length": float(len("".join(answers)))}) for answers in rollouts], 0.25


def run(ask, *, task=None, num_samples=2, max_tokens=64, prompt=PROMPT, score=score_by_length, seed=1, step_timeout=60):
    sampling = Sampling(num_samples, max_new_tokens=8, temperature=1.0, max_tokens=max_tokens)
    parts = dict(tokenizer=TOKENIZER, ask=ask, score=score, sampling=sampling, seed=seed, step_timeout=step_timeout)
    return asyncio.run(run_group(prompt, task=task or OneTurn(), **parts))


def decode(rollout: Rollout, provenance: Provenance) -> str:
    return TOKENIZER.decode(rollout.tokens[rollout.provenance == provenance], skip_special_tokens=False)


def test_tokens_and_their_records_are_kept_verbatim():
    group = run(Generator("12", "x"))
    assert group.prompt_id == PROMPT.id and not group.refused and group.seconds_score == 0.25
    first, second = group.rollouts
    prompt_tokens = TOKENIZER.encode("4,6=")
    assert first.tokens.tolist() == [*prompt_tokens, *TOKENIZER.encode("12"), EOS]
    assert first.provenance.tolist() == [0] * 4 + [1] * 3
    assert first.logprobs.tolist() == [0] * 4 + [-1, -2, -3]
    assert first.versions.tolist() == [-1] * 4 + [3, 4, 5]
    assert [(turn.start, turn.stop, turn.stop_reason) for turn in first.turns] == [(4, 7, "stop")]
    assert (first.text, first.status, first.reward, first.reward_parts) == ("12", "ok", 2.0, {"length": 2.0})
    assert (first.sample, second.sample, second.text) == (0, 1, "x")
    assert [first.tokens.dtype, first.provenance.dtype, first.logprobs.dtype, first.versions.dtype] == [
        np.int32,
        np.int8,
        np.float32,
        np.int32,
    ]


def test_a_forced_token_is_kept_and_is_not_the_models():
    """Nor has it a log-probability or a version: a trainer would compare them."""
    tokens, forced = np.array([7, 8, 9, EOS], np.int32), np.array([False, True, False, False])

    async def ask(request):
        columns = np.full(4, -0.5, np.float32), np.full(4, 3, np.int32)
        return [Completion(tokens, *columns, "stop", penalties=Penalties(1.2), forced=forced) for _ in request.seeds]

    rollout = run(ask).rollouts[0]
    assert rollout.tokens[4:].tolist() == tokens.tolist() and rollout.penalties == Penalties(1.2)
    assert rollout.provenance[4:].tolist() == [1, Provenance.FORCED, 1, 1] and rollout.num_model_tokens == 3
    assert rollout.logprobs[4:].tolist() == [-0.5, 0, -0.5, -0.5] and rollout.versions[4:].tolist() == [3, -1, 3, 3]
    assert [(turn.start, turn.stop) for turn in rollout.turns] == [(4, 8)]


def test_tokens_that_text_would_not_give_back_are_kept():
    odd = np.array([TOKENIZER.unk_token_id, TOKENIZER.pad_token_id, 5, EOS, 6], np.int32)

    async def ask(request):
        return [Completion(odd, np.zeros(5, np.float32), np.zeros(5, np.int32), "stop") for _ in request.seeds]

    assert run(ask).rollouts[0].tokens[4:].tolist() == odd.tolist()


def test_all_samples_are_one_request():
    ask = Generator()
    run(ask, num_samples=5)
    [request] = ask.requests
    assert len(request.seeds) == 5 and request.temperature == 1.0 and request.max_new_tokens == 8


def test_running_out_of_tokens_is_truncation_and_keeps_the_reward():
    assert {(r.status, r.reward) for r in run(Generator("12", "34", stop_reason="length")).rollouts} == {
        ("truncated", 2.0)
    }


@pytest.mark.parametrize("status", ["timeout", "infra_error"])
def test_failure_to_score_is_never_truncation(status):
    async def fail(prompt, rollouts):
        return [Score(status, {}, "why")] * len(rollouts), 0.0

    rollouts = run(Generator(stop_reason="length"), score=fail, num_samples=2).rollouts
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert (rollout.status, rollout.reward, rollout.reward_parts) == (status, 0.0, {})
        assert rollout.failure == "why"


def test_environment_replies_once_and_is_told_from_the_model():
    ask = Generator("ok", "no", "yes")
    quick, slow = run(ask, task=AsksAgain()).rollouts
    assert (quick.text, slow.text) == ("ok", "no\n> again:\nyes")
    assert decode(quick, Provenance.TOOL) == ""
    assert decode(slow, Provenance.TEMPLATE) == "4,6="
    assert decode(slow, Provenance.TOOL) == "again:"
    assert decode(slow, Provenance.MODEL) == "no<eos>yes<eos>"
    assert TOKENIZER.decode(slow.tokens) == "4,6=no<eos>again:yes<eos>"
    assert [(turn.start, turn.stop) for turn in slow.turns] == [(4, 7), (13, 17)]
    wrote = slow.provenance == Provenance.MODEL
    assert (slow.versions[~wrote] == -1).all() and (slow.logprobs[~wrote] == 0).all()
    assert slow.reward == 5
    assert ask.requests[1].tokens.tolist() == slow.tokens[:13].tolist()


def test_no_reply_to_an_answer_that_ran_out_of_tokens():
    ask = Generator(stop_reason="length")
    assert all(len(rollout.turns) == 1 for rollout in run(ask, task=AsksAgain()).rollouts)
    assert len(ask.requests) == 1


def test_prompt_that_leaves_no_room_is_refused_by_name_before_anyone_is_asked():
    ask = Generator()
    group = run(ask, max_tokens=4)
    assert (group.rollouts, group.refused, ask.requests) == ([], "prompt_too_long", [])


def test_answers_never_outgrow_the_longest_rollout():
    ask = Generator("no", "no")
    run(ask, task=AsksAgain(), max_tokens=15)
    assert [request.max_new_tokens for request in ask.requests] == [8, 2, 2]
    ask = Generator("no", "no")
    rollouts = run(ask, task=AsksAgain(), max_tokens=13).rollouts
    assert len(ask.requests) == 1 and all(len(rollout.tokens) <= 13 for rollout in rollouts)


def test_conversation_cut_for_want_of_room_is_truncated():
    rollouts = run(Generator("no", "ok"), task=AsksAgain(), max_tokens=13).rollouts
    assert [rollout.status for rollout in rollouts] == ["truncated", "ok"]


def test_seeds_are_named_by_prompt_sample_and_turn_whatever_the_order():
    def seeds(prompt_id="a", num_samples=4, seed=1, task=None) -> list[list[int]]:
        ask = Generator("no", "no", "no", "no")
        run(ask, prompt=Prompt(prompt_id, "4,6=", "2", {}), num_samples=num_samples, seed=seed, task=task)
        return [request.seeds for request in ask.requests]

    [first] = seeds()
    assert len(set(first)) == 4
    assert seeds() == [first] and seeds(num_samples=2) == [first[:2]]
    seeds("z")
    assert seeds() == [first]
    first_turn, *later = seeds(task=AsksAgain())
    everything = [*first_turn, *sum(later, []), *seeds("b")[0], *seeds(seed=2)[0]]
    assert first_turn == first and len(set(everything)) == len(everything) == 16


def test_slow_samples_do_not_change_the_seeds_of_later_turns():
    class Slow(Generator):
        async def __call__(self, request):
            if len(request.seeds) == 1:
                await asyncio.sleep(0.001 * (request.seeds[0] % 3))
            return await super().__call__(request)

    def later_seeds(ask):
        run(ask, task=AsksAgain(), num_samples=4)
        return {request.seeds[0] for request in ask.requests[1:]}

    assert later_seeds(Slow("a", "b", "c", "d")) == later_seeds(Generator("a", "b", "c", "d"))


def test_chat_messages_go_through_the_template():
    class Chat(OneTurn):
        def messages(self, prompt):
            return [{"role": "user", "content": prompt.text}]

    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    tokens = encode_prompt(Chat(), tokenizer, PROMPT)
    assert tokenizer.decode(tokens) == "[user]4,6=[bot]" and tokens.dtype == np.int32


def test_demonstration_is_the_expected_answer_with_its_end():
    rollout = asyncio.run(demonstrate(PROMPT, OneTurn(), TOKENIZER, 60))
    assert TOKENIZER.decode(rollout.tokens) == "4,6=2<eos>"
    assert rollout.provenance.tolist() == [0] * 4 + [1] * 2 and rollout.status == "ok"


def test_each_token_keeps_the_experts_of_the_first_pass_over_it():
    """Made of the number of the request; an episode that forks has those of its own pass over what it repeats."""

    def completion(number: int, context: int) -> Completion:
        tokens = np.array([5, 6, 7], np.int32)
        experts_TLK = np.full((context + 2, 1, 1), number, np.uint8)
        return Completion(tokens, np.zeros(3), np.zeros(3), "stop", routed_experts=experts_TLK)

    episode = Episode(np.array([1, 2], np.int32))
    episode.add_completion(completion(10, 2), "")
    episode.add_reply([], np.array([8, 9], np.int32), np.full(2, Provenance.TOOL))
    episode.add_completion(completion(20, 7), "")
    assert episode.routed_experts.flatten().tolist() == [10] * 4 + [20] * 5 + [255]
    fork = episode.fork(1)
    assert fork.routed_experts is None
    fork.add_completion(completion(30, 5), "")
    assert fork.routed_experts.flatten().tolist() == [30] * 7 + [255]
    episode.join(fork)
    assert episode.routed_experts.flatten().tolist() == [10] * 4 + [20] * 5 + [255] + [30] * 7 + [255]
    rollout = episode.finish(PROMPT, 0, Score("ok", {"right": 1.0}))
    assert rollout.routed_experts is episode.routed_experts


def test_each_sample_is_reprompted_with_another_ones_right_answer():
    """Two are right: the first of them is shown to all others, and the second one to it."""

    async def score(prompt, rollouts):
        return [Score("ok", {"right": float(answers[0] in ("2", "02"))}) for answers in rollouts], 0.0

    def group(*answers: str, **settings):
        sampling = Sampling(
            len(answers), 8, 1.0, settings.pop("max_tokens", 64), reprompt_template="{prompt}[{solution}]"
        )
        parts = dict(tokenizer=TOKENIZER, ask=Generator(*answers), score=score, sampling=sampling, seed=1)
        return asyncio.run(run_group(PROMPT, task=OneTurn(), step_timeout=60, **parts))

    def read(rollout) -> str | None:
        return None if rollout.reprompt is None else TOKENIZER.decode(rollout.reprompt)

    assert [read(r) for r in group("1", "2", "7", "02").rollouts] == ["4,6=[2]", "4,6=[02]", "4,6=[2]", "4,6=[2]"]
    assert [read(r) for r in group("1", "2").rollouts] == ["4,6=[2]", None]  # its own is not another one's
    assert [read(r) for r in group("1", "7").rollouts] == [None, None]
    assert [read(r) for r in group("777", "2", max_tokens=10).rollouts] == [None, None]  # no room for the answer
