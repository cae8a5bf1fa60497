"""Thinking sections of answers: their tags, and the closings that a budget forced.

vLLM makes a model write the end tag once a section has as many tokens as its request's budget. That token was not
sampled; which ones they are follows from the tokens, so whoever reads a record finds them again, and believes no mark.
"""

from typing import NamedTuple

import numpy as np

from titan_rl.data.text.tokenizer import Tokenizer, decoded
from titan_rl.data.types import Rollout

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ThinkingTags(NamedTuple):
    """Ids of the tokens that open and close a thinking section."""

    start: int
    end: int


def thinking_tags(tokenizer: Tokenizer) -> ThinkingTags | None:
    """Tags of a model's thinking; None if its tokenizer has no token for each."""
    pairs = ((_id_of(tokenizer, start), _id_of(tokenizer, end)) for start, end in _TAGS)
    return next((ThinkingTags(start, end) for start, end in pairs if start is not None and end is not None), None)


def _id_of(tokenizer: Tokenizer, word: str) -> int | None:
    """Id of the token that is this word; None if there is none."""
    found = tokenizer.convert_tokens_to_ids(word)
    if not isinstance(found, int) or tokenizer.convert_ids_to_tokens(found) != word:  # it is the unknown token's
        return None
    return found


def forced_closings(prompt: np.ndarray, answer: np.ndarray, tags: ThinkingTags, budget: int) -> np.ndarray:
    """Whether each token of an answer was forced, bool [T].

    A token is forced if a section is open before it that has ``budget`` tokens or more, those in the prompt included.
    Errors: ValueError for a section that goes on beyond its budget.
    """
    tokens = np.concatenate([prompt, answer])
    place_T = np.arange(len(tokens))
    last_start, last_end = (
        np.maximum.accumulate(np.where(tokens == tag, place_T, -1)) if len(tokens) else place_T for tag in tags
    )
    # before each token of the answer: as of the token in front of it
    before = slice(len(prompt) - 1, len(tokens) - 1)
    start_A, end_A = last_start[before], last_end[before]
    forced_A = (start_A > end_A) & (place_T[len(prompt) :] - start_A - 1 >= budget)
    if (wrong := np.flatnonzero(forced_A & (answer != tags.end))).size:
        raise ValueError(f"token {wrong[0]} of an answer goes on thinking beyond a budget of {budget} tokens")
    return forced_A


def forced_tokens(rollout: Rollout, tags: ThinkingTags, budget: int) -> np.ndarray:
    """Whether each token of a rollout was forced, bool [T], by what each of its answers was asked with.

    An answer with log-probabilities that are not finite has none: its sampler chose otherwise, and the trainer names
    it. Errors: ValueError for a section that goes on beyond its budget.
    """
    forced_T = np.zeros(len(rollout.tokens), bool)
    for begin, end in rollout.spans:
        for turn in (turn for turn in rollout.turns if begin <= turn.start < end):
            context, answer = rollout.tokens[begin : turn.start], slice(turn.start, turn.stop)
            if np.isfinite(rollout.logprobs[answer]).all():
                forced_T[answer] = forced_closings(context, rollout.tokens[answer], tags, budget)
    return forced_T


def open_tokens(prompt: np.ndarray, tags: ThinkingTags) -> int | None:
    """Number of tokens of the section that is open at a prompt's end; None if none is."""
    (*_, start), (*_, end) = ([-1, *np.flatnonzero(prompt == tag)] for tag in tags)
    return len(prompt) - int(start) - 1 if start > end else None


def ends_closed(prompt: np.ndarray, tags: ThinkingTags, tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends with a closed section, white space aside: its answer begins without thinking."""
    ends = np.flatnonzero(prompt == tags.end)
    return bool(len(ends)) and not decoded(tokenizer, prompt[ends[-1] + 1 :]).strip()
