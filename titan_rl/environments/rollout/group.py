"""Group of rollouts of one prompt: sampling, environment replies, scoring."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.images import PlacedImage
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import Tokenizer
from titan_rl.data.text.turns import decode_images, encode_shown
from titan_rl.data.types import Group, Prompt, Sampling
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.agents.episodes import play_agent
from titan_rl.environments.conversation.episode import Ask, Episode, Player, PromptTooLong
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, task_of
from titan_rl.environments.rollout.reprompts import add_reprompts
from titan_rl.mesh.processes.deadlines import together

ScoreAll = Callable[[Prompt, list[list[str]]], Coroutine[Any, Any, tuple[list[Score], float]]]
"""From a prompt and its rollouts' answers to scores and seconds."""
Judge = Callable[[list[np.ndarray]], Coroutine[Any, Any, tuple[list[Score], float]]]
"""From the rollouts' tokens to a reward model's scores and seconds."""
_DECODING = ThreadPoolExecutor(2, "images")
"""An image may have 64 million pixels, so few are decoded at once."""


def encode_prompt(task: Task, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """Tokens of a prompt, int32 [T]; besides an environment's replies the only text that is ever tokenized.

    Errors: as ``encode_with_images``.
    """
    return encode_with_images(task, tokenizer, prompt)[0]


def encode_with_images(
    task: Task, tokenizer: Tokenizer, prompt: Prompt, decoded: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, list[PlacedImage]]:
    """Tokens of a prompt, int32 [T], and its images in their places.

    ``decoded``: its images, if they are already. Errors: ConfigError if the chat template refuses the messages, or the
    prompt's own options; for an image that cannot be read, and where images are not shown.
    """
    images = decode_images(tokenizer, prompt.images) if decoded is None else decoded
    tokenizer = with_options(tokenizer, prompt.template_options)
    task = task.parts.get(prompt.task, task)
    if images and (task.has_agent or task.speaks_first):
        raise ConfigError("it has images, which are not shown to agents, nor where environments speak first")
    return encode_shown(tokenizer, task.messages(prompt), task.tools_of(prompt), images)


async def _decoded(tokenizer: Tokenizer, prompt: Prompt) -> list[np.ndarray]:
    """Other episodes go on meanwhile."""
    if not prompt.images:
        return []
    return await asyncio.get_running_loop().run_in_executor(_DECODING, decode_images, tokenizer, prompt.images)


async def run_group(
    prompt: Prompt,
    *,
    task: Task,
    tokenizer: Tokenizer,
    ask: Ask,
    score: ScoreAll,
    sampling: Sampling,
    seed: int,
    step_timeout: float,
    judge: Judge | None = None,
    endpoint: Endpoint | None = None,
) -> Group:
    """Play and score all samples of one prompt.

    The first turn is one request; later turns, if the environment replies, one a sample.
    Where environments speak first, each sample has a beginning of its own, and the first turn is one a sample too.
    Where agents drive the model, each asks as it likes, at the ``endpoint``.

    ``step_timeout``: seconds that an environment has for a reply.

    An environment, a task or a chat template that fails is no error here: its rollouts say ``infra_error`` or
    ``timeout``, and why.
    """
    start, begun, task = time.perf_counter(), time.time(), task_of(task, prompt)
    try:
        decoded = await _decoded(tokenizer, prompt)
        prompt_tokens, images = encode_with_images(task, tokenizer, prompt, decoded)
        tokenizer = with_options(tokenizer, prompt.template_options)
        is_chat = not isinstance(task.messages(prompt), str)
    except ConfigError as error:
        return _failed_group(prompt, sampling.num_samples, str(error))
    if len(prompt_tokens) >= sampling.max_tokens:
        return Group(prompt.id, [], refused="prompt_too_long")
    player = Player(prompt, task, tokenizer, ask, sampling, seed, step_timeout, is_chat, images)
    try:
        if endpoint is not None and task.has_agent:
            episodes = await _played_by_agents(player, endpoint, prompt_tokens)
        else:
            episodes = await player.first_turns(prompt_tokens)
            await together(player.play(episode, sample) for sample, episode in enumerate(episodes))
    except PromptTooLong:
        return Group(prompt.id, [], refused="prompt_too_long")
    seconds_generate = time.perf_counter() - start
    scoring = score(prompt, [episode.answers for episode in episodes])
    if judge is None:
        scores, seconds_score = await scoring
        judged: Sequence[Score | None] = [None] * len(episodes)
    else:
        judging = judge([episode.last_branch for episode in episodes])
        (scores, seconds_score), (judged, seconds_judge) = await together([scoring, judging])
        seconds_score = max(seconds_score, seconds_judge)
    rollouts = [
        episode.finish(prompt, sample, scored, by_model)
        for sample, (episode, scored, by_model) in enumerate(zip(episodes, scores, judged, strict=True))
    ]
    if sampling.reprompt_template:
        answers = [episode.answers for episode in episodes]
        add_reprompts(rollouts, answers, prompt, task, tokenizer, sampling)
    return Group(
        prompt_id=prompt.id,
        rollouts=rollouts,
        seconds_generate=seconds_generate,
        seconds_score=seconds_score,
        begun=begun,
    )


async def _played_by_agents(player: Player, endpoint: Endpoint, prompt_tokens: np.ndarray) -> list[Episode]:
    """Episodes of agents; each seat is a sample of its own."""
    num_samples, num_seats = player.sampling.num_samples, max(len(player.task.seats), 1)
    numbers = range(-(-num_samples // num_seats))
    played = await together(play_agent(player, endpoint, number, prompt_tokens) for number in numbers)
    return [episode for episodes in played for episode in episodes][:num_samples]


def _failed_group(prompt: Prompt, num_samples: int, failure: str) -> Group:
    """Group of a prompt that the chat template refuses."""
    episode = Episode(np.zeros(0, np.int32))
    return Group(prompt.id, [episode.finish(prompt, i, Score("infra_error", {}, failure)) for i in range(num_samples)])
