"""A rollout's text as tokens, turn by turn, without tokenizing what the model wrote.

The first turn is the template's rendering of the messages. What stands between the model's answer and its next turn is
found once for each tokenizer and each number of replies, by rendering a short conversation of marks:

    ...answer<|im_end|>\\n<|im_start|>user\\nREPLY<|im_end|>\\n<|im_start|>assistant\\n
             ╰──────── pieces[0] ───────╯     ╰──────────── pieces[1] ────────────╯

A model that ended its turn has sampled the end token already, so that is not written twice. Prompts and replies are
text of whoever wrote them: none of it becomes a control token (control_tokens.py).
"""

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.images import ImageProcessor, PlacedImage
from titan_rl.data.text.chat_template import (
    REPLY,
    Tools,
    first_left_out,
    first_unrendered,
    message,
    render_with_tools,
    reply_template,
)
from titan_rl.data.text.control_tokens import (
    check_plain,
    control_tokens,
    end_of_answer,
    plain,
    with_end,
    written_answer,
)
from titan_rl.data.text.message_forms import changed_texts, is_text, with_texts
from titan_rl.data.text.messages import IMAGE_MARK, Message, content_of, with_images
from titan_rl.data.text.tokenizer import Tokenizer, encode_behind, encode_from_start, text_settings, tokens_and_owner
from titan_rl.data.types import Provenance

NO_TEMPLATE = (
    "task.style = 'chat' needs a chat template, and the model's tokenizer has none: take an instruction-tuned "
    "model, set model.chat_template.file, or set task.style = 'compact'"
)


def encode_messages(
    tokenizer: Tokenizer,
    messages: str | list[Message],
    tools: Tools = (),
    *,
    is_plain: bool = False,
    num_images: int = 0,
) -> np.ndarray:
    """A prompt's tokens, int32 [T]: text from its beginning, messages through the template, up to where the model
    begins.

    ``tools``: schemas of what the model may call. A template without a place for them has them in the system message.
    Control tokens in it are broken up. ``is_plain``: whether those in the messages are meant, or broken up already.
    ``num_images``: so many are shown (``with_images``), a token each.

    Errors: ConfigError if there is no template, or it refuses the messages.
    """
    if isinstance(messages, str):
        text = messages if is_plain else plain(tokenizer, messages)
        tokens = np.asarray(encode_from_start(tokenizer, text), np.int32)
        processor = text_settings(tokenizer).images
        if num_images and IMAGE_MARK in messages:
            raise ConfigError(
                f"its images stand where {IMAGE_MARK} does only with task.style = 'chat': set it, or take "
                f"{IMAGE_MARK} out of the text, which they then stand before"
            )
        return processor.behind_images(tokens, num_images) if processor and num_images else tokens
    tools = _plain_tools(tokenizer, tools)
    plain_messages = messages if is_plain else _plain(tokenizer, messages)
    check_roles(tokenizer, messages, tools)
    shown = with_images(plain_messages, num_images)
    return np.asarray(render_with_tools(tokenizer, shown, tools, tokenize=True), np.int32)


def decode_images(tokenizer: Tokenizer, images: Sequence[bytes]) -> list[np.ndarray]:
    """A prompt's images as resized pixels, uint8 [H, W, 3] each. A large one takes seconds.

    Errors: ConfigError for images that cannot be read, or that the model does not see.
    """
    if not images:
        return []
    if (processor := text_settings(tokenizer).images) is None:
        raise ConfigError("it has images, and the model sees none: set model.path to a vision model's")
    return [_decoded(processor, *each) for each in enumerate(images, 1)]


def encode_shown(
    tokenizer: Tokenizer, messages: str | list[Message], tools: Tools, images: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[PlacedImage]]:
    """Tokens of a prompt, as ``encode_messages``, and its decoded images in their places. Errors: as there, and
    ConfigError where the chat template does not show as many."""
    if not images:
        return encode_messages(tokenizer, messages, tools), []
    processor = text_settings(tokenizer).images
    assert processor is not None, "they were decoded"
    tokens = encode_messages(tokenizer, messages, tools, num_images=len(images))
    try:
        return processor.expand(tokens, images)
    except ValueError as error:
        raise ConfigError(f"it {error}") from None


def _decoded(processor: ImageProcessor, number: int, image: bytes) -> np.ndarray:
    """Errors: ConfigError."""
    try:
        return processor.decode(image)
    except ValueError as error:
        raise ConfigError(f"its image {number} {error}") from None


def _plain(tokenizer: Tokenizer, messages: list[Message]) -> list[Message]:
    return [with_texts(each, partial(plain, tokenizer, role=each["role"])) for each in messages]


def _plain_tools(tokenizer: Tokenizer, tools: Tools) -> Tools:
    return json.loads(_plain_json(tokenizer, json.dumps(list(tools)))) if tools else ()


@lru_cache(maxsize=64)
def _plain_json(tokenizer: Tokenizer, value: str) -> str:
    return json.dumps(changed_texts(json.loads(value), partial(plain, tokenizer)))


def check_roles(tokenizer: Tokenizer, messages: list[Message], tools: Tools = ()) -> None:
    """Check of the template for a message's roles.

    Errors: ConfigError if there is no template, or it leaves out what somebody says.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(NO_TEMPLATE)
    roles = tuple(each["role"] for each in messages)
    is_plain = all(map(is_text, messages))
    if is_plain and tools and "tool" in roles:
        return  # the template's variant for tools shows them (reply_template)
    number = first_unrendered(tokenizer, roles) if is_plain else first_left_out(tokenizer, messages, tools)
    if number is None:
        return
    if roles[number] == "assistant":
        raise ConfigError(
            f"the model's chat template leaves out a tool call of the assistant's, or an argument of one, at place "
            f"{number + 1} of {', '.join(roles)}: give one call a message, or set model.chat_template.file to one "
            f"that writes them all"
        )
    mend = "leave task.system_prompt and" if roles[number] == "system" else "leave"
    raise ConfigError(
        f"the model's chat template has no place for a {roles[number]} message at place {number + 1} of "
        f"{', '.join(roles)}: {mend} such messages out, or take another template"
    )


def encode_opening(
    tokenizer: Tokenizer, messages: str | list[Message], tools: Tools, replies: Sequence[Message]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and provenance, int8 [T], of a prompt with what the environment says before the first answer.

    Behind a message of the user's the words stand in that message, a blank line apart, since most templates refuse two
    messages of a user in a row. Errors: as ``encode_messages``.
    """
    opening = plain(tokenizer, "\n".join(map(content_of, replies)), replies[0]["role"] if replies else "")
    if isinstance(messages, str):
        prompt = encode_messages(tokenizer, messages)
        words = np.asarray(encode_behind(tokenizer, messages, opening), np.int32)
        provenance = np.repeat([Provenance.TEMPLATE, Provenance.TOOL], [len(prompt), len(words)])
        return np.concatenate([prompt, words]), provenance.astype(np.int8)
    tools = _plain_tools(tokenizer, tools)
    check_roles(tokenizer, messages, tools)
    plain_messages = _plain(tokenizer, messages)
    rendered, marked = (
        render_with_tools(tokenizer, _with_words(plain_messages, words), tools) for words in (opening, REPLY)
    )
    before, _, behind = marked.rpartition(REPLY)
    span = (len(before), len(rendered) - len(behind))
    tokens, is_said = tokens_and_owner(tokenizer, rendered, [span], begins=True)
    return tokens, np.where(is_said, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)


def _with_words(messages: list[Message], words: str) -> list[Message]:
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], message("user", f"{content_of(messages[-1])}\n\n{words}")]
    return [*messages, message("user", words)]


def encode_answer(tokenizer: Tokenizer, answer: str, *, is_chat: bool, tools: Tools = ()) -> np.ndarray:
    """Tokens of a worked example's answer with its end, int32 [T], as the model would sample it.

    Errors: ConfigError for one that holds a control token, or that the template cannot write.
    """
    check_plain(tokenizer, "a worked example", answer)
    if not is_chat:
        end = tokenizer.eos_token_id
        return np.asarray([*encode_behind(tokenizer, "", answer), end], np.int32)
    before, answer_text = written_answer(tokenizer, answer, _plain_tools(tokenizer, tools))
    tokens = encode_behind(tokenizer, before, answer_text)
    return np.asarray(with_end(tokenizer, tokens, [])[0], np.int32)


def encode_reply(
    tokenizer: Tokenizer, replies: Sequence[Message], last_token: int, *, is_chat: bool, tools: Tools = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and provenance, int8 [T], from the model's last sampled token to its next turn.

    ``replies``: messages, of one role each time. ``tools``: as the prompt's. Errors: ConfigError if ``is_chat`` and the
    template does not show where a reply stands.
    """
    if not is_chat:
        text = plain(tokenizer, "".join(map(content_of, replies)), replies[0]["role"])
        tokens = np.asarray(encode_behind(tokenizer, "", text), np.int32)
        return tokens, np.full(len(tokens), Provenance.TOOL, np.int8)
    template = reply_template(tokenizer, replies[0]["role"], len(replies), _plain_tools(tokenizer, tools))
    texts = [template.written(plain(tokenizer, content_of(reply), reply["role"])) for reply in replies]
    parts = [part for pair in zip(template.pieces, texts, strict=False) for part in pair] + [template.pieces[-1]]
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    spans = list(pairwise(starts))[1::2]
    tokens, is_reply = tokens_and_owner(tokenizer, "".join(parts), spans, begins=False)
    start = _after_end(tokenizer, tokens, is_reply, last_token)
    provenance = np.where(is_reply, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)
    return tokens[start:], provenance[start:]


def _after_end(tokenizer: Tokenizer, tokens: np.ndarray, is_reply: np.ndarray, last_token: int) -> int:
    """Where to go on if the model has itself written the template's end of a turn; else 0.

    A template may end its last answer with another token than those before: then that has the place of the other. An
    answer that a text has stopped ends with any token, which the template may have between two turns, too.
    """
    control = control_tokens(tokenizer)
    if last_token not in control and last_token != tokenizer.eos_token_id:
        return 0
    before = tokens[: (int(np.argmax(is_reply)) if is_reply.any() else len(tokens)) or len(tokens)]
    ends = np.flatnonzero(before == last_token)
    if not len(ends) and last_token == end_of_answer(tokenizer):
        ends = np.flatnonzero(np.isin(before, list(control)))
    return int(ends[0]) + 1 if len(ends) else 0
