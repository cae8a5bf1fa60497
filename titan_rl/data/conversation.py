"""Text and conversations become tokens, each with who wrote it: the assistant's are learned, all others are not.

A conversation is rendered by the model's chat template, and cut where the assistant begins and ends to write:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n | hello<|im_end|>\\n | <|im_start|>user\\n...
                                            template  | the assistant's    | template

The cuts are where the template's renderings of the conversation's beginnings end. Each piece is tokenized once, by
itself, as sampling meets it: the prompt first, then the answer. Of the assistant's piece what follows its last special
token (the end of the turn) is the template's. A template that renders a beginning otherwise once more follows is cut by
its own ``{% generation %}`` marks, or else refused.
"""

import re
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2 import TemplateError

from titan_rl.config.load import ConfigError
from titan_rl.data.row_fields import Message
from titan_rl.data.tokenizer import Tokenizer
from titan_rl.data.types import Provenance

Tokens = tuple[np.ndarray, np.ndarray]
"""int32 [T], and the provenance of each, int8 [T]."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


def render(tokenizer: Tokenizer, messages: list[Message], *, tokenize: bool = False, **settings: Any) -> Any:
    """By the chat template. Errors: ConfigError with what the template says."""
    asked: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False} | settings
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **asked)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:  # a template is a program
        roles = ", ".join(message["role"] for message in messages)
        said = " ".join(str(error).split())
        raise ConfigError(f"the model's chat template refuses messages of {roles}: {said}") from None


def first_unknown(tokenizer: Tokenizer, text: str) -> str | None:
    """A character of the text that becomes the unknown token, if any; the text itself if none does alone."""

    def has_unknown(part: str) -> bool:
        return tokenizer.unk_token_id in tokenizer.encode(part, add_special_tokens=False)

    if tokenizer.unk_token_id is None or not has_unknown(text):
        return None
    return next((character for character in dict.fromkeys(text) if has_unknown(character)), text)


def _tokens(pieces: list[tuple[list[int], Provenance]]) -> Tokens:
    provenance = [np.full(len(tokens), who, np.int8) for tokens, who in pieces]
    return np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in pieces]), np.concatenate(provenance)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# text


def encode_text(tokenizer: Tokenizer, text: str) -> Tokens:
    """Text that is learned from its second token on, with the end of sequence."""
    tokens = [*_beginning(tokenizer), *_encode(tokenizer, text), tokenizer.eos_token_id]
    return _tokens([(tokens[:1], Provenance.TEMPLATE), (tokens[1:], Provenance.MODEL)])


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """The token that the model's sequences begin with, where its tokenizer says that they do."""
    return [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> Tokens:
    """Text after text, with the end of sequence, as a rollout of style ``compact`` has it."""
    answer = [*_encode(tokenizer, completion), tokenizer.eos_token_id]
    return _tokens([(_encode(tokenizer, prompt), Provenance.TEMPLATE), (answer, Provenance.MODEL)])


# conversations


def encode_conversation(tokenizer: Tokenizer, prompt: list[Message], answer: list[Message]) -> Tokens:
    """What the assistant writes in ``answer`` is learned, and nothing of ``prompt``.

    Errors: ConfigError if the template does not show what the assistant wrote, or a message holds a special token.
    """
    for message in (*prompt, *answer):
        _check_plain(tokenizer, message)
    conversation = [*prompt, *answer]
    whole = render(tokenizer, conversation, add_generation_prompt=False)
    cuts = _cuts(tokenizer, conversation, len(prompt), whole)
    if cuts is None:
        return _by_marks(tokenizer, prompt, conversation)
    pieces: list[tuple[list[int], Provenance]] = []
    for number, (start, stop) in enumerate(pairwise([0, *cuts])):  # the template's and the assistant's take turns
        tokens = _encode(tokenizer, whole[start:stop])
        pieces += _turn(tokenizer, tokens) if number % 2 else [(tokens, Provenance.TEMPLATE)]
    return _tokens(pieces)


def _check_plain(tokenizer: Tokenizer, message: Message) -> None:
    """Errors: ConfigError for text that the tokenizer would read as the beginning or the end of a turn."""
    for special in tokenizer.all_special_tokens:
        if special in message["content"]:
            raise ConfigError(
                f"a message of {message['role']} holds {special!r}, which this model's tokenizer takes for more than "
                f"text: leave it out"
            )


def _cuts(tokenizer: Tokenizer, conversation: list[Message], first: int, whole: str) -> list[int] | None:
    """Where each of the assistant's turns from message ``first`` on begins and ends in the rendered whole; None if the
    template renders a beginning otherwise than the whole begins."""
    cuts = []
    for index in range(first, len(conversation)):
        if conversation[index]["role"] != "assistant":
            continue
        before = render(tokenizer, conversation[:index])
        after = render(tokenizer, conversation[: index + 1], add_generation_prompt=False)
        if not whole.startswith(after) or not after.startswith(before) or len(after) == len(before):
            return None
        cuts += [len(before), len(after)]
    return cuts


def _turn(tokenizer: Tokenizer, tokens: list[int]) -> list[tuple[list[int], Provenance]]:
    """The assistant's tokens up to the end of its turn, and what the template writes after that."""
    special = set(tokenizer.all_special_ids)
    last = max((place for place, token in enumerate(tokens) if token in special), default=len(tokens) - 1)
    return [(tokens[: last + 1], Provenance.MODEL), (tokens[last + 1 :], Provenance.TEMPLATE)]


def _by_marks(tokenizer: Tokenizer, prompt: list[Message], conversation: list[Message]) -> Tokens:
    """By the template's own marks of what the assistant wrote."""
    if not _GENERATION.search(str(tokenizer.chat_template)):
        raise ConfigError(
            "the model's chat template writes the beginning of a conversation otherwise once more follows, and does "
            "not mark with {% generation %} what the assistant wrote: take another template, or rows of one answer"
        )
    asked = {"add_generation_prompt": False, "return_dict": True, "return_assistant_tokens_mask": True}
    found = render(tokenizer, conversation, tokenize=True, **asked)
    tokens, mask = np.asarray(found["input_ids"], np.int32), np.asarray(found["assistant_masks"], bool)
    given = np.asarray(render(tokenizer, prompt, tokenize=True) if prompt else [], np.int32)
    if not np.array_equal(tokens[: len(given)], given) or not mask[len(given) :].any():
        raise ConfigError(
            "the model's chat template does not show the prompt as it is once it is answered: take another"
        )
    mask[: len(given)] = False
    return tokens, np.where(mask, Provenance.MODEL, Provenance.TEMPLATE).astype(np.int8)
