"""A conversation as the model's chat template writes it, turn by turn, without tokenizing what the model wrote.

The first turn is the template's rendering of the messages. What stands between the model's answer and its next turn is
found once for each tokenizer and each number of replies, by rendering a short conversation of marks:

    ...answer<|im_end|>\\n<|im_start|>user\\nREPLY<|im_end|>\\n<|im_start|>assistant\\n
             ╰──────── pieces[0] ───────╯     ╰──────────── pieces[1] ────────────╯

A model that ended its turn has sampled the end token already, so that is not written twice. A reply is text of whoever
wrote it: what the tokenizer would take for a special token is broken up, so that no tool's output can begin a turn.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.conversation import render
from titan_rl.data.tokenizer import Tokenizer
from titan_rl.data.types import Provenance

_ASKED, _ANSWER, _REPLY = "asked-mark", "answer-mark", "reply-mark"


@dataclass(frozen=True)
class ReplyTemplate:
    """The text around replies, from the end of the model's answer to the start of its next one."""

    pieces: tuple[str, ...]
    """Before the first reply, between two, and behind the last."""
    is_trimmed: bool
    """Whether the template strips a message's text."""
    is_json: bool
    """Whether it writes a message's text as a JSON string; the quotes are in the pieces."""

    def written(self, reply: str) -> str:
        reply = reply.strip() if self.is_trimmed else reply
        return _as_json(reply) if self.is_json else reply


def check_chat_template(tokenizer: Tokenizer, *, replies: bool = False) -> None:
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


def encode_messages(
    tokenizer: Tokenizer, messages: str | list[dict[str, str]], tools: Sequence[dict[str, Any]] = ()
) -> np.ndarray:
    """A prompt's tokens, int32 [T]: text as it is, messages through the template, up to where the model begins.

    ``tools``: schemas of what the model may call. A template without a place for them has them in the system message.

    Errors: ConfigError if there is no template, or it refuses the messages.
    """
    if isinstance(messages, str):
        return np.asarray(tokenizer.encode(messages, add_special_tokens=False), np.int32)
    if tokenizer.chat_template is None:
        check_chat_template(tokenizer)
    return np.asarray(_render_prompt(tokenizer, messages, tools, tokenize=True), np.int32)


def _render_prompt(
    tokenizer: Tokenizer, messages: list[dict[str, str]], tools: Sequence[dict[str, Any]], *, tokenize: bool
) -> Any:
    if not tools:
        return render(tokenizer, messages, tokenize=tokenize)
    if tells_of_tools(tokenizer):
        return render(tokenizer, messages, tokenize=tokenize, tools=list(tools))
    return render(tokenizer, with_tools(messages, tools), tokenize=tokenize)


def encode_opening(
    tokenizer: Tokenizer,
    messages: str | list[dict[str, str]],
    tools: Sequence[dict[str, Any]],
    replies: Sequence[dict[str, str]],
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and provenance, int8 [T], of a prompt with what the environment says before the first answer.

    Behind a message of the user's the words stand in that message, a blank line apart, since most templates refuse two
    messages of a user in a row. Errors: as ``encode_messages``.
    """
    said = "\n".join(without_special(tokenizer, reply["content"]) for reply in replies)
    if isinstance(messages, str):
        prompt, words = (encode_messages(tokenizer, text) for text in (messages, said))
        provenance = np.repeat([Provenance.TEMPLATE, Provenance.TOOL], [len(prompt), len(words)])
        return np.concatenate([prompt, words]), provenance.astype(np.int8)
    rendered, marked = (
        _render_prompt(tokenizer, _with_words(messages, words), tools, tokenize=False) for words in (said, _REPLY)
    )
    before, _, behind = marked.rpartition(_REPLY)
    tokens, is_said = _tokens_and_owner(tokenizer, rendered, [(len(before), len(rendered) - len(behind))])
    return tokens, np.where(is_said, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)


def _with_words(messages: list[dict[str, str]], words: str) -> list[dict[str, str]]:
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], _message("user", f"{messages[-1]['content']}\n\n{words}")]
    return [*messages, _message("user", words)]


@lru_cache(maxsize=4)
def tells_of_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes out the tools that it is given."""
    asked, mark = [_message("user", _ASKED)], "tool-mark"
    schema = {"name": mark, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        return mark in render(tokenizer, asked, tools=[{"type": "function", "function": schema}])
    except ConfigError:
        return False


def with_tools(messages: list[dict[str, str]], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The same, whose system message tells of the tools and of how they are called."""
    schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
    told = (
        f"You can call these tools:\n{schemas}\nTo call one, write nothing but\n"
        f'<tool_call>{{"name": the tool, "arguments": {{...}}}}</tool_call>\nand you will be given its result.'
    )
    if messages[0]["role"] != "system":
        return [_message("system", told), *messages]
    return [_message("system", f"{messages[0]['content']}\n\n{told}"), *messages[1:]]


def encode_reply(
    tokenizer: Tokenizer, replies: Sequence[dict[str, str]], last_token: int, *, is_chat: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and provenance, int8 [T], from the model's last sampled token to its next turn.

    ``replies``: messages, of one role each time. Errors: ConfigError if ``is_chat`` and the template does not show
    where a reply stands.
    """
    texts = [without_special(tokenizer, reply["content"]) for reply in replies]
    if not is_chat:
        tokens = np.asarray(tokenizer.encode("".join(texts), add_special_tokens=False), np.int32)
        return tokens, np.full(len(tokens), Provenance.TOOL, np.int8)
    template = reply_template(tokenizer, replies[0]["role"], len(replies))
    texts = [template.written(text) for text in texts]
    parts = [part for pair in zip(template.pieces, texts, strict=False) for part in pair] + [template.pieces[-1]]
    starts = np.cumsum([0, *map(len, parts)])
    tokens, is_reply = _tokens_and_owner(tokenizer, "".join(parts), list(pairwise(starts.tolist()))[1::2])
    start = _after_end_token(tokens, is_reply, last_token)
    provenance = np.where(is_reply, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)
    return tokens[start:], provenance[start:]


def without_special(tokenizer: Tokenizer, text: str) -> str:
    """The text, with a space in each place that the tokenizer would read as a token that it was given beside its words,
    such as the end of a turn or the beginning of a tool's result."""
    added = tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]  # each kind has it
    for token in (*tokenizer.all_special_tokens, *added):
        if len(token.split()) == 1 and len(token) > 2:  # spaces in a row are added words in some, and mean nothing
            text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def _tokens_and_owner(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and whether each holds any character of these spans; all do if the tokenizer cannot tell."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
    tokens = np.asarray(encoded["input_ids"], np.int32)
    if not tokenizer.is_fast:
        return tokens, np.ones(len(tokens), bool)
    first, last = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
    return tokens, np.any([(last > start) & (first < stop) for start, stop in spans], axis=0)


def _after_end_token(tokens: np.ndarray, is_reply: np.ndarray, last_token: int) -> int:
    """Where to go on if the model has itself written the template's end of a turn; else 0."""
    num_before = int(np.argmax(is_reply)) if is_reply.any() else len(tokens)
    [ends] = np.nonzero(tokens[: num_before or len(tokens)] == last_token)
    return int(ends[0]) + 1 if len(ends) else 0


@lru_cache(maxsize=64)
def reply_template(tokenizer: Tokenizer, role: str = "user", count: int = 1) -> ReplyTemplate:
    """Around ``count`` replies of the role; a template that does not know the role ``tool`` is told of a user's.

    Errors: ConfigError if the template does not show an answer and replies as they are, one after the other.
    """
    try:
        return _reply_template(tokenizer, role, count)
    except ConfigError:
        if role == "user":
            raise
        return _reply_template(tokenizer, "user", count)


def _reply_template(tokenizer: Tokenizer, role: str, count: int) -> ReplyTemplate:
    marks = [f"{_REPLY}-{number}" for number in range(count)]
    rendered = _render_replies(tokenizer, role, marks)
    if rendered.count(_ANSWER) != 1 or any(rendered.count(mark) != 1 for mark in marks):
        raise ConfigError(
            "the model's chat template does not show an answer and the reply to it once each, as they are: "
            "this task replies, so it needs another model or template"
        )
    rest, pieces = rendered.partition(_ANSWER)[2], []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found:
            raise ConfigError(
                "the model's chat template shows a reply before the answer: take another model or template"
            )
        pieces.append(piece)
    is_trimmed = _render_replies(tokenizer, role, [f" {mark} " for mark in marks]) == rendered
    odd = [f'{mark}"\\\n<é>' for mark in marks]
    as_it_is = _render_replies(tokenizer, role, odd)
    is_json = not all(text in as_it_is for text in odd)
    if is_json and not all(_as_json(text) in as_it_is for text in odd):
        raise ConfigError("the model's chat template changes the text of a reply: take another model or template")
    return ReplyTemplate((*pieces, rest), is_trimmed, is_json)


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _render_replies(tokenizer: Tokenizer, role: str, replies: list[str]) -> str:
    conversation = [_message("user", _ASKED), _message("assistant", _ANSWER)]
    return render(tokenizer, [*conversation, *(_message(role, reply) for reply in replies)])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
