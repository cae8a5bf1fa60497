"""Reprompts: what a self-teacher reads before it judges an answer, a prompt with another sample's right answer."""

import re
from collections.abc import Sequence

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.text.messages import Message, content_of
from titan_rl.data.text.tokenizer import Tokenizer
from titan_rl.data.text.turns import encode_messages
from titan_rl.data.types import Prompt, Rollout, Sampling, correct
from titan_rl.environments.interfaces.task import Task


def reprompted(template: str, prompt: str, solution: str) -> str:
    """Text of a reprompt. What prompt and solution hold is text, whatever it looks like."""
    values = {"prompt": prompt, "solution": solution}
    return re.sub(r"\{(prompt|solution)\}", lambda place: values[place[1]], template)


def add_reprompts(
    rollouts: Sequence[Rollout],
    answers: Sequence[list[str]],
    prompt: Prompt,
    task: Task,
    tokenizer: Tokenizer,
    sampling: Sampling,
) -> None:
    """Set the reprompts of a group's rollouts: of each by the first right answer that is not its own.

    None for a rollout that has no score, of whose peers none is right, or whose reprompt leaves no room for its answer.
    """
    right = [number for number, rollout in enumerate(rollouts) if _is_right(rollout)]
    encoded: dict[str, np.ndarray | None] = {}
    for number, rollout in enumerate(rollouts):
        peer = next((other for other in right if other != number), None)
        if peer is None or not rollout.is_scored:
            continue
        solution = answers[peer][0]
        if solution not in encoded:
            encoded[solution] = _encoded(sampling.reprompt_template, prompt, task, tokenizer, solution)
        reprompt = encoded[solution]
        if reprompt is not None and len(reprompt) + rollout.num_model_tokens <= sampling.max_tokens:
            rollout.reprompt = reprompt


def _is_right(rollout: Rollout) -> bool:
    return rollout.status == "ok" and correct(rollout.true_reward)


def _encoded(template: str, prompt: Prompt, task: Task, tokenizer: Tokenizer, solution: str) -> np.ndarray | None:
    """Tokens of a reprompt; None if the chat template refuses it."""
    messages = task.messages(prompt)
    try:
        if isinstance(messages, str):
            return encode_messages(tokenizer, reprompted(template, messages, solution))
        *before, last = messages
        content = reprompted(template, content_of(last), solution)
        told: Message = {**last, "content": content}
        return encode_messages(tokenizer, [*before, told], task.tools_of(prompt))
    except ConfigError:
        return None
