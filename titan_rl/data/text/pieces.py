"""Tokenized pieces of text: the beginning of a sequence, and pieces read after a prefix.

A tokenizer of SentencePiece's kind writes a space before whatever text it is given. A piece in the middle of a
sequence has none, so it is tokenized behind other text, of which the tokens are then left out.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from titan_rl.data.text.tokenizer import Tokenizer

_NEUTRAL = ("\n", ":", "|", "a")
"""What a piece is tokenized behind where its own context would melt into it."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text alone, without what a sequence begins or ends with."""
    return tokenizer.encode(text, add_special_tokens=False)


@lru_cache(maxsize=8)
def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token at the beginning of the model's sequences, where its tokenizer has one."""
    return tuple(token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id)


def encode_from_start(tokenizer: Tokenizer, text: str) -> list[int]:
    """Text that a sequence begins with: the beginning of a sequence once, also where the text holds it."""
    tokens, first = encode(tokenizer, text), list(beginning(tokenizer))
    return tokens if tokens[: len(first)] == first else first + tokens


def encode_behind(tokenizer: Tokenizer, context: str, text: str) -> list[int]:
    """Tokens of a text that stands behind others, which have tokens already."""
    before = _chosen(tokenizer, context, text)
    return encode(tokenizer, before + text)[len(encode(tokenizer, before)) :]


def tokens_and_owner(
    tokenizer: Tokenizer, text: str, spans: Iterable[tuple[int, int]], *, begins: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and whether each holds any character of these spans; all do if the tokenizer cannot tell.

    ``begins``: whether the text is the beginning of a sequence, and stands behind nothing.
    """
    before = "" if begins else _chosen(tokenizer, "", text)
    num_before = len(encode(tokenizer, before))
    encoded = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
    tokens = np.asarray(encoded["input_ids"][num_before:], np.int32)
    if not tokenizer.is_fast:
        return tokens, np.ones(len(tokens), bool)
    first, last = np.asarray(encoded["offset_mapping"][num_before:]).reshape(-1, 2).T - len(before)
    return tokens, np.any([(last > start) & (first < stop) for start, stop in spans], axis=0)


@lru_cache(maxsize=8)
def _writes_a_space(tokenizer: Tokenizer) -> bool:
    """Whether text by itself becomes other tokens than behind a line end."""
    head, both = encode(tokenizer, "\n"), encode(tokenizer, "\na")
    return both[: len(head)] == head and both[len(head) :] != encode(tokenizer, "a")


def _chosen(tokenizer: Tokenizer, context: str, text: str) -> str:
    """What to tokenize the text behind: nothing where that makes no difference, else the first whose own tokens stay
    as they are."""
    if not _writes_a_space(tokenizer):
        return ""
    for before in (context, *_NEUTRAL):
        head = encode(tokenizer, before)
        if before and encode(tokenizer, before + text)[: len(head)] == head:
            return before
    return ""
