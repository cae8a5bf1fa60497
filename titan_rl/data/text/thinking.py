"""Thinking sections of answers: their tags, and the closings that a budget forced.

vLLM makes a model write the end tag once a section has as many tokens as its request's budget. That token was not
sampled; which ones they are follows from the tokens alone, so a record needs no more.
"""

from typing import NamedTuple

import numpy as np

from titan_rl.data.text.tokenizer import Tokenizer

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ThinkingTags(NamedTuple):
    """Ids of the tokens that open and close a thinking section."""

    start: int
    end: int


def thinking_tags(tokenizer: Tokenizer) -> ThinkingTags | None:
    """Tags of a model's thinking; None if its tokenizer has no token for each."""
    words = tokenizer.get_vocab()
    known = (pair for pair in _TAGS if all(tag in words for tag in pair))
    return next((ThinkingTags(*(words[tag] for tag in pair)) for pair in known), None)


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


def closes_thinking(tokens: np.ndarray, tags: ThinkingTags) -> bool:
    """Whether tokens, such as those that ask for an answer, have a section of thinking, and close it."""
    ends = np.flatnonzero(tokens == tags.end)
    return bool(len(ends)) and not (tokens[ends[-1] :] == tags.start).any()
