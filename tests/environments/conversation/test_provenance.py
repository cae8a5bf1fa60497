"""Random episodes through every kind of template: each token is whose it says, and as the engine gave it."""

import asyncio
import random
from itertools import pairwise

import numpy as np
import pytest
from chat_templates import ENDS, SCHEMA, SPECIAL, byte_pair_tokenizer, with_template
from random_episodes import TEMPLATES, TEXTS, Engine

from titan_rl.data.text.chat_template import reply_template
from titan_rl.data.text.control_tokens import plain
from titan_rl.data.text.turns import encode_messages
from titan_rl.data.types import Prompt, Provenance, Sampling
from titan_rl.environments.interfaces import task as tasks
from titan_rl.environments.interfaces.environment import OneAnswer, Reply
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.rollout.group import run_group
from titan_rl.models.builtin.tokenizer import character_tokenizer

SAMPLES = 3


class Chance(OneAnswer):
    """Replies as often as it likes, in either role, with whatever text; some of its answers are rewarded."""

    def __init__(self, draw: random.Random, said: list[list[dict[str, str]]]):
        self.draw, self.said = draw, said

    async def step(self, answer):
        if self.draw.random() < 0.25:
            return Reply(reward=self.draw.random())
        role, count = self.draw.choice(["user", "tool", "tool"]), self.draw.randint(1, 3)
        messages = [{"role": role, "content": "".join(self.draw.choices(TEXTS, k=3))} for _ in range(count)]
        self.said.append(messages)
        return Reply(messages)


class Task(tasks.Task):
    def __init__(self, draw: random.Random, tools):
        self.draw, self.tools, self.said = draw, tools, []

    def messages(self, prompt):
        return [dict(role="user", content="4,6=")]

    def environment(self, prompt):
        self.said.append([])
        return Chance(self.draw, self.said[-1])


def play(tokenizer, seed: int, tools, end: str):
    draw = random.Random(seed)
    task, engine = Task(draw, tools), Engine(draw, tokenizer, tokenizer.convert_tokens_to_ids(end))

    async def score(prompt, answers):
        return [Score("ok", {"right": 1.0})] * len(answers), 0.0

    sampling = Sampling(SAMPLES, 16, 1.0, 600)
    prompt = Prompt("train/0000001", "4,6=", "2", {})
    work = dict(
        task=task, tokenizer=tokenizer, ask=engine.ask, score=score, sampling=sampling, seed=seed, step_timeout=60
    )
    return asyncio.run(run_group(prompt, **work)).rollouts, task, engine


@pytest.mark.parametrize("make", [character_tokenizer, byte_pair_tokenizer], ids=["characters", "byte pairs"])
@pytest.mark.parametrize("tools", [(), (SCHEMA,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_token_is_whose_it_says_and_as_the_engine_gave_it(name, tools, make):
    tokenizer, end = with_template(TEMPLATES[name], make), ENDS.get(TEMPLATES[name], "<|im_end|>")
    end = "<|eot_id|>" if name == "llama_3" else end
    special = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    num_turns = 0
    for seed in range(12):
        rollouts, task, engine = play(tokenizer, seed, tools, end)
        assert [rollout.failure for rollout in rollouts] == [""] * SAMPLES
        given = {gave.logprobs.tobytes(): (asked, gave) for asked, gave in zip(engine.asked, engine.gave, strict=True)}
        num_used = 0
        for rollout in rollouts:
            wrote = np.zeros(len(rollout.tokens), bool)
            for turn in rollout.turns:
                span = slice(turn.start, turn.stop)
                asked, gave = given[rollout.logprobs[span].tobytes()]
                assert rollout.tokens[: turn.start].tolist() == asked.tolist(), "it was asked with these very tokens"
                assert rollout.tokens[span].tolist() == gave.tokens.tolist()
                assert rollout.versions[span].tolist() == gave.versions.tolist()
                wrote[span] = True
                num_used += 1
            assert ((rollout.provenance == Provenance.MODEL) == wrote).all(), "what it sampled is trained, and no more"
            assert not rollout.logprobs[~wrote].any() and (rollout.versions[~wrote] == -1).all()
            assert not special & set(rollout.tokens[rollout.provenance == Provenance.TOOL].tolist())
        assert num_used == len(engine.gave), "nothing that was sampled is lost"
        num_turns += num_used
        check_what_stands_between(tokenizer, rollouts, task)
    assert num_turns > 60


def check_what_stands_between(tokenizer, rollouts, task) -> None:
    """The prompt is the template's, and so is what is around each reply; the replies are whole."""
    start = encode_messages(tokenizer, task.messages(None), task.tools).tolist()
    for rollout, said in zip(rollouts, task.said, strict=True):  # environments are made in the order of the samples
        assert rollout.tokens[: len(start)].tolist() == start
        between = [rollout.tokens[a.stop : b.start] for a, b in pairwise(rollout.turns)]
        written = [_written(tokenizer, messages) for messages in said[: len(between)]]
        assert [tokenizer.decode(tokens) for tokens in between] == written


def _written(tokenizer, messages) -> str:
    """What the template puts behind the end that the model has written, up to the next answer."""
    texts = [plain(tokenizer, message["content"], message["role"]) for message in messages]
    template = reply_template(tokenizer, messages[0]["role"], len(messages))
    parts = [part for pair in zip(template.pieces, map(template.written, texts), strict=False) for part in pair]
    end = next(token for token in ENDS.values() if template.pieces[0].startswith(token))
    return "".join([*parts, template.pieces[-1]]).removeprefix(end)
