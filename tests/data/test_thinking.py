"""Thinking sections: their tags, and which closings a budget forced, by the tokens alone."""

import numpy as np
import pytest
from made_rollouts import rollout_of

from titan_rl.data.text.thinking import ThinkingTags, forced_closings, forced_tokens, open_tokens, thinking_tags
from titan_rl.data.types import Turn
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
    ("prompt", "count"), [([5, 1, 2, 6], None), ([5, 1], 0), ([5], None), ([1, 2, 1, 7], 1), ([2, 6], None), ([], None)]
)
def test_tokens_of_a_section_that_a_prompt_leaves_open(prompt, count):
    assert open_tokens(np.array(prompt), TAGS) == count


def test_what_was_forced_in_a_rollout_follows_from_the_context_of_each_answer():
    """The second branch has another context; of numbers that are not finite nothing is said."""
    tokens = np.array([5, 1, 6, 2, 8, 1, 9, 2, 5, 1, 2, 2, 7], np.int32)
    turns = [Turn(1, 5, "stop"), Turn(6, 8, "stop"), Turn(10, 13, "stop")]
    rollout = rollout_of("a", 9, tokens=tokens, turns=turns, branches=[0, 8])
    assert np.flatnonzero(forced_tokens(rollout, TAGS, 1)).tolist() == [3, 7]
    rollout.logprobs[7] = np.nan
    assert np.flatnonzero(forced_tokens(rollout, TAGS, 1)).tolist() == [3]
    rollout.logprobs[:] = 0
    rollout.tokens[3] = 9
    with pytest.raises(ValueError, match="goes on thinking"):
        forced_tokens(rollout, TAGS, 1)
