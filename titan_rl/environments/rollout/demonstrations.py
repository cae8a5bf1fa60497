"""Demonstrations as rollouts, for SFT: the task's answers, with the environment's replies."""

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import Tokenizer
from titan_rl.data.text.turns import encode_answer, encode_opening, encode_reply
from titan_rl.data.types import Completion, Prompt, Rollout
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, task_of
from titan_rl.environments.rollout.group import encode_with_images
from titan_rl.mesh.processes.deadlines import together, within


async def demonstrate_all(
    prompts: Iterable[Prompt], task: Task, tokenizer: Tokenizer, step_timeout: float
) -> list[Rollout]:
    """Rollouts of all prompts, made side by side, since tools may be slow. Errors: as ``demonstrate``."""
    return await together(demonstrate(prompt, task, tokenizer, step_timeout) for prompt in prompts)


async def demonstrate(prompt: Prompt, task: Task, tokenizer: Tokenizer, step_timeout: float) -> Rollout:
    """Rollout of a prompt's worked example.

    Errors: ConfigError if the task has none, or its environment ends before it; the environment's own.
    """
    task = task_of(task, prompt)
    async with task.sessions or nullcontext():
        return await _demonstrate(prompt, task, tokenizer, step_timeout)


async def _demonstrate(prompt: Prompt, task: Task, tokenizer: Tokenizer, step_timeout: float) -> Rollout:
    tokenizer = with_options(tokenizer, prompt.template_options)
    episode = Episode(*encode_with_images(task, tokenizer, prompt))
    environment = task.environment(prompt)
    is_chat, answers = not isinstance(task.messages(prompt), str), worked_answers(task, prompt)
    tools = task.tools_of(prompt)
    try:
        if (opening := await within(step_timeout, f"a reset for {prompt.id}", environment.reset())) is not None:
            encoded = encode_opening(tokenizer, task.messages(prompt), tools, opening.messages)
            episode.open(opening.messages, *encoded)
        for number, answer in enumerate(answers):
            tokens = encode_answer(tokenizer, answer, is_chat=is_chat, tools=tools)
            empty = np.zeros(len(tokens))
            episode.add_completion(Completion(tokens, empty, empty - 1, "stop"), answer)
            if number == len(answers) - 1:
                break
            reply = await within(step_timeout, f"a reply to {prompt.id}'s worked example", environment.step(answer))
            if not reply.messages:
                raise ConfigError(f"prompt {prompt.id}: its environment is over before its worked example is")
            encoded = encode_reply(tokenizer, reply.messages, int(tokens[-1]), is_chat=is_chat, tools=tools)
            episode.add_reply(reply.messages, *encoded)
    finally:
        await environment.close()
    return episode.finish(prompt, 0, Score("ok", {"demonstration": 1.0}))


def worked_answers(task: Task, prompt: Prompt) -> list[str]:
    """Worked answers, one for each turn. Errors: ConfigError if the task has no worked example."""
    answers = task.demonstration(prompt)
    return [answers] if isinstance(answers, str) else list(answers)
