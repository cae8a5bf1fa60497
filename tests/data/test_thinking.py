"""Thinking sections: their tags, and which closings a budget forced, by the tokens alone."""

import numpy as np
import pytest

from titan_rl.data.text.thinking import ThinkingTags, closes_thinking, forced_closings, thinking_tags
from titan_rl.models.builtin.tokenizer import character_tokenizer

TAGS = ThinkingTags(1, 2)


@pytest.mark.parametrize(
    ("prompt", "answer", "budget", "forced"),
    [
        ([5], [1, 6, 7, 2, 8], 2, [3]),  # as long as it may be
        ([5], [1, 6, 2, 7, 8], 2, []),  # it closed by itself
        ([5, 1], [6, 7, 2, 8], 2, [2]),  # the prompt has opened it
        ([1, 6, 7], [2, 8], 2, [0]),  # and has used it up
        ([1, 6, 2], [7, 8, 9], 1, []),  # and has closed it
        ([5], [1, 6, 2, 1, 7, 2, 8], 1, [2, 5]),  # each section has the budget
        ([5], [1, 6, 1, 7, 2, 2], 2, []),  # one that begins anew counts from there
        ([5], [6, 7, 8], 1, []),  # none
        ([5], [], 1, []),
    ],
)
def test_what_was_forced_follows_from_the_tokens(prompt, answer, budget, forced):
    found = forced_closings(np.array(prompt), np.array(answer, np.int32), TAGS, budget)
    assert np.flatnonzero(found).tolist() == forced and len(found) == len(answer)


def test_thinking_beyond_its_budget_is_an_error():
    with pytest.raises(ValueError, match="token 2 of an answer goes on thinking beyond a budget of 1 tokens"):
        forced_closings(np.array([5]), np.array([1, 6, 7, 2]), TAGS, 1)


def test_tags_are_single_tokens_of_the_vocabulary():
    tokenizer = character_tokenizer()
    assert thinking_tags(tokenizer) is None
    tokenizer.add_tokens(["<think>"])
    assert thinking_tags(tokenizer) is None
    tokenizer.add_tokens(["</think>"])
    assert thinking_tags(tokenizer) == (len(tokenizer) - 2, len(tokenizer) - 1)
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["[THINK]", "[/THINK]"])
    assert thinking_tags(tokenizer) == (len(tokenizer) - 2, len(tokenizer) - 1)


@pytest.mark.parametrize(
    ("tokens", "closes"), [([5, 1, 2, 6], True), ([5, 1], False), ([5], False), ([1, 2, 1], False), ([2, 6], True)]
)
def test_a_prompt_that_closes_thinking(tokens, closes):
    assert closes_thinking(np.array(tokens), TAGS) == closes
