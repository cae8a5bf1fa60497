"""A conversation as the model's chat template writes it, turn by turn, without tokenizing what the model wrote.

The first turn is the template's rendering of the messages. What stands between the model's answer and its next turn is
found once for each tokenizer, by rendering a short conversation of marks:

    ...answer<|im_end|>\\n<|im_start|>user\\nREPLY<|im_end|>\\n<|im_start|>assistant\\n
             ╰───────── before ─────────╯     ╰────────────── after ──────────────╯

A model that ended its turn has sampled the end token already, so that is not written twice.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.conversation import render
from titan_rl.data.types import Provenance

_ASKED, _ANSWER, _REPLY = "asked-mark", "answer-mark", "reply-mark"


@dataclass(frozen=True)
class ReplyTemplate:
    """The text around a reply, from the end of the model's answer to the start of its next one."""

    before: str
    after: str
    is_trimmed: bool
    """Whether the template strips a message's text."""


def check_chat_template(tokenizer, *, replies: bool = False) -> None:
    """Errors: ConfigError if the model has no chat template, or one that cannot render a question.

    ``replies``: whether the task may reply, so that what stands between turns is needed too.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "task.style = 'chat' needs a chat template, and the model's tokenizer has none: take an instruction-tuned "
            "model, add chat_template.jinja to model.path, or set task.style = 'compact'"
        )
    render(tokenizer, [_message("user", _ASKED)])
    if replies:
        reply_template(tokenizer)


def encode_messages(tokenizer, messages: str | list[dict[str, str]]) -> np.ndarray:
    """A prompt's tokens, int32 [T]: text as it is, messages through the template, up to where the model begins.

    Errors: ConfigError if there is no template, or it refuses the messages.
    """
    if isinstance(messages, str):
        return np.asarray(tokenizer.encode(messages, add_special_tokens=False), np.int32)
    if tokenizer.chat_template is None:
        check_chat_template(tokenizer)
    return np.asarray(render(tokenizer, messages, tokenize=True), np.int32)


def encode_reply(tokenizer, reply: str, last_token: int, *, is_chat: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and provenance, int8 [T], from the model's last sampled token to its next turn.

    Errors: ConfigError if ``is_chat`` and the template does not show where a reply stands.
    """
    if not is_chat:
        tokens = np.asarray(tokenizer.encode(reply, add_special_tokens=False), np.int32)
        return tokens, np.full(len(tokens), Provenance.TOOL, np.int8)
    template = reply_template(tokenizer)
    reply = reply.strip() if template.is_trimmed else reply
    text = template.before + reply + template.after
    tokens, is_reply = _tokens_and_owner(tokenizer, text, len(template.before), len(template.before) + len(reply))
    start = _after_end_token(tokens, is_reply, last_token)
    provenance = np.where(is_reply, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)
    return tokens[start:], provenance[start:]


def _tokens_and_owner(tokenizer, text: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and whether each holds any of the characters [start, stop); all do if the tokenizer cannot tell."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    tokens = np.asarray(encoded["input_ids"], np.int32)
    if not tokenizer.is_fast:
        return tokens, np.ones(len(tokens), bool)
    first, last = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
    return tokens, (last > start) & (first < stop)


def _after_end_token(tokens: np.ndarray, is_reply: np.ndarray, last_token: int) -> int:
    """Where to go on if the model has itself written the template's end of a turn; else 0."""
    num_before = int(np.argmax(is_reply)) if is_reply.any() else len(tokens)
    [ends] = np.nonzero(tokens[: num_before or len(tokens)] == last_token)
    return int(ends[0]) + 1 if len(ends) else 0


@lru_cache(maxsize=4)
def reply_template(tokenizer) -> ReplyTemplate:
    """Errors: ConfigError if the template does not show an answer and a reply as they are, one after the other."""
    rendered = _render_reply(tokenizer, _REPLY)
    if rendered.count(_ANSWER) != 1 or rendered.count(_REPLY) != 1:
        raise ConfigError(
            "the model's chat template does not show an answer and the reply to it once each, as they are: "
            "this task replies, so it needs another model or template"
        )
    between = rendered.partition(_ANSWER)[2]
    before, found, after = between.partition(_REPLY)
    if not found:
        raise ConfigError("the model's chat template shows a reply before the answer: take another model or template")
    return ReplyTemplate(before, after, is_trimmed=_render_reply(tokenizer, f" {_REPLY} ") == rendered)


def _render_reply(tokenizer, reply: str) -> str:
    conversation = [_message("user", _ASKED), _message("assistant", _ANSWER), _message("user", reply)]
    return render(tokenizer, conversation)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
