"""Rows of data as tokens, each with who wrote it: the assistant's are learned, all others are not.

A conversation is rendered by the model's chat template, and cut where the assistant begins and ends to write:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n | hello<|im_end|>\\n | <|im_start|>user\\n...
                                            template  | the assistant's    | template

The cuts are where the template's renderings of the conversation's beginnings end. Each piece is tokenized once, by
itself, as sampling meets it: the prompt first, then the answer. Of the assistant's piece what follows its last control
token (the end of the turn) is the template's. Where a template renders an answer otherwise once more follows, as Qwen3
does with empty thoughts, the piece goes up to the next answer, and its first end of a turn ends what is learned. Where
an option alone opens an earlier answer in words that the whole has not, as ``enable_thinking = false`` does in Qwen3,
that answer begins as without options; the last one must stand behind what the model is asked with, or the row is
refused. A
template that renders what comes before an answer otherwise is cut by its own ``{% generation %}`` marks, or else
refused. So is one that leaves out what an answer says.
"""

import json
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.text.chat_template import Tools, render_with_tools
from titan_rl.data.text.control_tokens import check_plain, end_of_answer, plain, with_end
from titan_rl.data.text.message_forms import texts_in, texts_of
from titan_rl.data.text.messages import Message, content_of, reasoning_of
from titan_rl.data.text.rendering import without_options
from titan_rl.data.text.tokenizer import (
    Tokenizer,
    beginning,
    encode,
    encode_behind,
    encode_from_start,
    has_unknown_words,
)
from titan_rl.data.text.turns import check_roles
from titan_rl.data.types import Provenance

Tokens = tuple[np.ndarray, np.ndarray]
"""int32 [T], and the provenance of each, int8 [T]."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


def first_unknown(tokenizer: Tokenizer, text: str) -> str | None:
    """A character of the text that becomes the unknown token, if any; the text itself if none does alone.

    The token's own name is no unknown word: many models have their end of sequence for it.
    """

    def has_unknown(part: str) -> bool:
        return tokenizer.unk_token_id in encode(tokenizer, part)

    if not has_unknown_words(tokenizer) or not has_unknown(text) or not has_unknown(text := plain(tokenizer, text)):
        return None
    return next((character for character in dict.fromkeys(text) if has_unknown(character)), text)


def _tokens(pieces: list[tuple[list[int], Provenance]]) -> Tokens:
    provenance = [np.full(len(tokens), who, np.int8) for tokens, who in pieces]
    return np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in pieces]), np.concatenate(provenance)


# text


def encode_text(tokenizer: Tokenizer, text: str) -> Tokens:
    """Text that is learned with the end of sequence; from its second token on, if nothing begins a sequence."""
    check_plain(tokenizer, "the text", text)
    tokens: list[Any] = [*encode_from_start(tokenizer, text), tokenizer.eos_token_id]
    start = len(beginning(tokenizer)) or 1
    return _tokens([(tokens[:start], Provenance.TEMPLATE), (tokens[start:], Provenance.MODEL)])


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> Tokens:
    """Text after text, with the end of sequence, as a rollout of style ``compact`` has it."""
    check_plain(tokenizer, "the prompt", prompt)
    check_plain(tokenizer, "the completion", completion)
    answer: list[Any] = [*encode_behind(tokenizer, prompt, completion), tokenizer.eos_token_id]
    return _tokens([(encode_from_start(tokenizer, prompt), Provenance.TEMPLATE), (answer, Provenance.MODEL)])


# conversations


def encode_conversation(
    tokenizer: Tokenizer, prompt: list[Message], answer: list[Message], tools: Tools = ()
) -> Tokens:
    """Tokens and provenance of a conversation: the assistant's messages in ``answer`` are trained, nothing of
    ``prompt``.

    ``tools``: schemas of what the assistant may call. Errors: ConfigError if the template does not show what the
    assistant wrote, or a message or a schema holds a control token.
    """
    conversation = [*prompt, *answer]
    for each in conversation:
        for text in texts_of(each):
            check_plain(tokenizer, f"a message of {each['role']}", text)
    _check_tools(tokenizer, json.dumps(list(tools)))
    check_roles(tokenizer, conversation, tools)
    beginnings = _Beginnings(tokenizer, conversation, tools)
    _check_asked(beginnings, len(prompt))
    cuts = _cuts(beginnings, len(prompt))
    if cuts is None:
        return _by_marks(beginnings, len(prompt))
    whole = beginnings.whole
    _check_shown(answer, [whole[begin:end] for begin, end in zip(cuts[::2], cuts[1::2], strict=True)])
    return _tokens(_owned(tokenizer, whole, cuts))


class _Beginnings:
    """Renderings of a conversation's beginnings, each made once."""

    def __init__(self, tokenizer: Tokenizer, conversation: list[Message], tools: Tools) -> None:
        self.tokenizer, self.conversation, self.tools = tokenizer, conversation, tools
        self._texts: dict[tuple[int, bool], str] = {}

    @property
    def whole(self) -> str:
        return self.text(len(self.conversation))

    def text(self, count: int, *, asks: bool = False) -> str:
        """Rendering of so many messages; empty of none. ``asks``: with what the model begins an answer behind."""
        if (count, asks) not in self._texts:
            self._texts[count, asks] = self._rendered(self.tokenizer, count, asks)
        return self._texts[count, asks]

    def length(self, count: int, *, asks: bool = False) -> int | None:
        """Length of such a rendering, with or without the template's options; None if the whole does not begin so."""
        if self.whole.startswith(text := self.text(count, asks=asks)):
            return len(text)
        if not asks:
            return None
        text = self._rendered(without_options(self.tokenizer), count, asks)
        return len(text) if self.whole.startswith(text) else None

    def _rendered(self, tokenizer: Tokenizer, count: int, asks: bool) -> str:
        messages = self.conversation[:count]
        return render_with_tools(tokenizer, messages, self.tools, add_generation_prompt=asks) if count else ""


@lru_cache(maxsize=64)
def _check_tools(tokenizer: Tokenizer, tools: str) -> None:
    for text in texts_in(json.loads(tools)):
        check_plain(tokenizer, "a tool's schema", text)


def _check_asked(beginnings: _Beginnings, first: int) -> None:
    """Check that the last answer stands behind what the model would be asked for it with. Errors: ConfigError."""
    places = _answers(beginnings.conversation, first)
    count = places[-1] if places else 0
    if beginnings.whole.startswith(asked := beginnings.text(count, asks=True)):
        return
    opening = asked.removeprefix(beginnings.text(count))
    raise ConfigError(
        f"the model's chat template asks for the last answer with {opening[-80:]!r}, and does not write it so: give "
        f"rows that end in an answer, without thinking of its own where an option forbids it, other "
        f"model.chat_template.options or chat_template_kwargs, or another template"
    )


def _answers(conversation: list[Message], first: int) -> list[int]:
    """Places of the assistant's messages from ``first`` on."""
    return [place for place in range(first, len(conversation)) if conversation[place]["role"] == "assistant"]


def _check_shown(answer: list[Message], spans: list[str]) -> None:
    """Check of what is learned for what the assistant's messages say, white space aside. Errors: ConfigError.

    ``spans``: one for each of these messages; where a template marks several of one, all count for each.
    """
    own = [each for each in answer if each["role"] == "assistant"]
    spans = spans if len(spans) == len(own) else ["".join(spans)] * len(own)
    for each, span in zip(own, spans, strict=True):
        written = "".join(span.split())
        parts = [("content", content_of(each)), *reasoning_of(each).items()]
        parts += [("tool_calls", call["function"]["name"]) for call in each.get("tool_calls", ())]
        if left_out := next((name for name, text in parts if "".join(text.split()) not in written), None):
            behind = " of an answer that others follow" if each is not own[-1] else ""
            raise ConfigError(
                f"the model's chat template leaves out {left_out!r}, or a part of it{behind}, which would not be "
                f"learned: give a row for each answer, or set model.chat_template.file to one that writes it"
            )


def _owned(tokenizer: Tokenizer, rendered: str, cuts: list[int]) -> list[tuple[list[int], Provenance]]:
    """The pieces between the cuts: the template's and the assistant's take turns, the template's first.

    An answer that the next turn's first token ends has that token, which is not written twice.
    """
    first, *others = [rendered[start:stop] for start, stop in pairwise([0, *cuts, len(rendered)])]
    pieces: list[tuple[list[int], Provenance]] = [(encode(tokenizer, first), Provenance.TEMPLATE)]
    done = first
    for answer, behind in zip(others[::2], others[1::2], strict=True):
        wrote = encode_behind(tokenizer, done, answer)
        following = encode_behind(tokenizer, done + answer, behind)
        its, rest = with_end(tokenizer, wrote, following)
        pieces += [(its, Provenance.MODEL), (rest, Provenance.TEMPLATE)]
        done += answer + behind
    return pieces


def _cuts(beginnings: _Beginnings, first: int) -> list[int] | None:
    """Where each of the assistant's turns from message ``first`` on begins and ends in the rendered whole; None if the
    template renders a beginning otherwise than the whole begins."""
    tokenizer, rendered = beginnings.tokenizer, beginnings.whole
    places = _answers(beginnings.conversation, first)
    begins = [beginnings.length(place, asks=True) for place in places]
    cuts: list[int] = []
    for number, (place, begin) in enumerate(zip(places, begins, strict=True)):
        end = beginnings.length(place + 1)
        if end is None and number + 1 < len(places) and not _has_marks(tokenizer):
            end = _with_end_inside(tokenizer, rendered, begin, begins[number + 1])
        if begin is None or end is None or end <= begin:
            return None
        cuts += [begin, end]
    return cuts


def _with_end_inside(tokenizer: Tokenizer, rendered: str, begin: int | None, end: int | None) -> int | None:
    """The end of a piece up to the next answer; None if the template's end of an answer is not in it."""
    if begin is None or end is None:
        return None
    return end if end_of_answer(tokenizer) in encode(tokenizer, rendered[begin:end]) else None


def _has_marks(tokenizer: Tokenizer) -> bool:
    """Whether the template marks with ``{% generation %}`` what the assistant wrote."""
    return _GENERATION.search(str(tokenizer.chat_template)) is not None


def _by_marks(beginnings: _Beginnings, first: int) -> Tokens:
    """By the template's own marks of what the assistant wrote. Errors: ConfigError."""
    tokenizer, conversation, tools = beginnings.tokenizer, beginnings.conversation, beginnings.tools
    if not _has_marks(tokenizer):
        shorter = ", or rows of one answer" if len(conversation) - first > 1 else ""
        raise ConfigError(
            "the model's chat template writes a conversation's beginning otherwise once it goes on, and does not mark "
            f"with {{% generation %}} what the assistant wrote: take another template{shorter}"
        )
    options = {"add_generation_prompt": False, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = render_with_tools(tokenizer, conversation, tools, tokenize=True, **options)
    tokens, mask = np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], bool)
    prompt_tokens = np.asarray(encode(tokenizer, beginnings.text(first, asks=True)), np.int32)
    if not np.array_equal(tokens[: len(prompt_tokens)], prompt_tokens) or not mask[len(prompt_tokens) :].any():
        raise ConfigError(
            "the model's chat template does not show the prompt as it is once it is answered: take another"
        )
    mask[: len(prompt_tokens)] = False
    mask[_last_opening(beginnings, first)] = False
    _check_shown(conversation[first:], _marked_texts(tokenizer, beginnings.whole, mask))
    return tokens, np.where(mask, Provenance.MODEL, Provenance.TEMPLATE).astype(np.int8)


def _last_opening(beginnings: _Beginnings, first: int) -> slice:
    """Tokens of the generation prompt before the last answer, which marks may enclose."""
    count = _answers(beginnings.conversation, first)[-1]
    return slice(*(len(encode(beginnings.tokenizer, beginnings.text(count, asks=asks))) for asks in (False, True)))


def _marked_texts(tokenizer: Tokenizer, rendered: str, mask: np.ndarray) -> list[str]:
    """Text of each run of marked tokens."""
    offsets = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return [
        rendered[offsets[start][0] : offsets[stop - 1][1]] for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
