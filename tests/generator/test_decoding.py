"""What real engines cut away from a distribution and stop at, and that the trainer has the same log-probabilities."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import ActorError
from started_meshes import meshes_of, worst_difference

from titan_rl.algorithms.batches.batching import sft_batches
from titan_rl.data.text.thinking import ThinkingTags, forced_closings
from titan_rl.data.text.tokenizer import read_tokenizer
from titan_rl.data.types import Completion, Decoding, Prompt, Provenance, Request
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.interfaces.score import Score
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.trainer.titan_config import build_titan

PROMPT = np.arange(10, 40, dtype=np.int32)
TAGS = {"`": "<think>", "~": "</think>"}
"""Characters of the tiny tokenizer that are tags here."""
START, END = (character_tokenizer().convert_tokens_to_ids(character) for character in TAGS)
THINKING = np.append(PROMPT, START).astype(np.int32)
CUT = {
    "none": Decoding(),
    "top-p": Decoding(top_p=0.9),
    "top-k": Decoding(top_k=50),
    "min-p": Decoding(min_p=0.05),
    "all": Decoding(top_p=0.8, top_k=20, min_p=0.1),
}
PENALIZED = {
    "repetition": Decoding(repetition_penalty=1.5),
    "presence": Decoding(presence_penalty=1.0),
    "frequency": Decoding(frequency_penalty=-0.5),
    "all, cut": Decoding(0.9, 50, 0.01, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
}
THOUGHT = {
    "budget": Decoding(thinking_budget=5),
    "budget, cut and penalties": Decoding(
        0.95, 60, 0.01, repetition_penalty=1.3, frequency_penalty=0.3, thinking_budget=3
    ),
}
ASKED = CUT | PENALIZED | THOUGHT


def rename_words(file: Path, names: dict[str, str]) -> None:
    table = json.loads(file.read_text())
    table["model"]["vocab"] = {names.get(word, word): number for word, number in table["model"]["vocab"].items()}
    file.write_text(json.dumps(table))


async def two_turns(meshes, leader, decoding: Decoding) -> tuple[list[int], float]:
    """Where the answers of a conversation begin, and as above the worst difference of their tokens."""
    episode = Episode(PROMPT)
    for turn in range(2):
        [completion] = await leader.generate.call_one(Request(episode.tokens, [7], 24, 0.2, decoding))
        episode.add_completion(completion, "")
        if not turn:
            episode.add_reply([], completion.tokens[:3], np.full(3, Provenance.TOOL))
    rollout = episode.finish(Prompt("a", "", "", {}), 0, Score("ok", {"right": 1.0}))
    batches = sft_batches([rollout], meshes.config, build_titan(meshes.config).layout)
    [metrics] = await meshes.trainer.train(batches, 1)
    return [turn.start for turn in rollout.turns], math.log(metrics.agreement_max)


async def beside_an_aborted_one(leader, ask) -> list[Completion]:
    """Answers while another request is aborted, which leaves nothing behind."""
    await leader.take_statistics.call_one()
    asked = Request(PROMPT, [5, 6], 120, 0.2, Decoding(stop_tokens=()), id="a")
    aborted = asyncio.ensure_future(result_of(leader.generate.call_one(asked)))
    beside = asyncio.ensure_future(ask(CUT["none"]))
    await asyncio.sleep(0)
    await leader.abort.call_one("a")  # which comes before it can be done
    with pytest.raises(ActorError, match="its caller has aborted it"):
        await aborted
    completions = await beside
    statistics = await leader.take_statistics.call_one()
    assert statistics.num_tokens == sum(len(completion.tokens) for completion in completions)
    return completions


async def result_of(answer):
    return await answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[list[Completion], float]]:
    """By each decoding, of a model that is sharp enough to be cut: completions, and the worst difference of a token's
    log-probability between trainer and generator; those at once are sampled in one batch of an engine."""
    folder = tmp_path_factory.mktemp("decoding")
    make_tiny(folder / "model", seed=1, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    rename_words(folder / "model" / "tokenizer.json", TAGS)

    async def run():
        tables = {"rollout": {"temperature": 0.2}, "optimizer": {"lr": 0.0}}
        async with meshes_of(str(folder / "model"), folder, **tables) as meshes:
            await meshes.trainer.begin_at(0)
            await meshes.weights.stage(0)
            await meshes.weights.announce(0)
            leader, found = meshes.generators.replicas[0].leader, {}

            async def ask(decoding: Decoding, temperature: float = 0.2) -> list[Completion]:
                prompt = THINKING if decoding.thinking_budget else PROMPT
                return await leader.generate.call_one(Request(prompt, [1, 2, 3, 4], 24, temperature, decoding))

            all_answers = await asyncio.gather(*map(ask, ASKED.values()))
            for name, completions in zip(ASKED, all_answers, strict=True):
                asked = THINKING if name in THOUGHT else PROMPT
                found[name] = completions, await worst_difference(meshes, (asked, completions))
                if name in PENALIZED:
                    plain = [replace(completion, penalties=None) for completion in completions]
                    found[f"{name}, unpenalized"] = plain, await worst_difference(meshes, (PROMPT, plain))
            for name in PENALIZED:
                found[f"{name}, two turns"] = await two_turns(meshes, leader, PENALIZED[name])
            found["greedy"] = await ask(CUT["top-p"], 0.0), 0.0
            found["beside an aborted one"] = await beside_an_aborted_one(leader, ask), 0.0
            text = read_tokenizer(folder / "model").decode(found["none"][0][0].tokens[3:6])
            found["stop"] = await ask(Decoding(stop=(text,))), 0.0
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", ASKED)
def test_trainer_and_generator_agree_about_each_token(answers, name):
    completions, worst = answers[name]
    print(f"worst ratio of {name}: {np.exp(worst):.8f}")
    assert worst < 1e-5
    assert (completions[0].mask is None) == (not ASKED[name].truncates)


def test_a_request_beside_one_that_is_aborted_has_the_same_answers(answers):
    alone, beside = answers["none"][0], answers["beside an aborted one"][0]
    assert [list(each.tokens) for each in beside] == [list(each.tokens) for each in alone]


@pytest.mark.parametrize("name", PENALIZED)
def test_a_second_answer_counts_from_its_own_beginning(answers, name):
    starts, worst = answers[f"{name}, two turns"]
    print(f"worst ratio of {name}: {np.exp(worst):.8f}")
    assert len(starts) == 2 and worst < 1e-5


@pytest.mark.parametrize("name", PENALIZED)
def test_without_its_penalties_a_penalized_answer_has_other_log_probabilities(answers, name):
    completions, _ = answers[name]
    assert {completion.penalties for completion in completions} == {ASKED[name].penalties}
    assert answers[f"{name}, unpenalized"][1] > 0.05


@pytest.mark.parametrize("name", [name for name in CUT if name != "none"])
def test_a_mask_has_the_token_and_is_what_the_setting_says(answers, name):
    decoding, vocabulary = CUT[name], answers[name][0][0].mask.vocabulary
    counts = np.concatenate([completion.mask.num_kept for completion in answers[name][0]])
    for completion in answers[name][0]:
        completion.mask.check()
        assert len(completion.mask) == len(completion.tokens)
        assert completion.mask.first_without(completion.tokens, np.arange(len(completion.tokens))) is None
    assert counts.min() < vocabulary and counts.max() <= (decoding.top_k or vocabulary), "ties are unlikely"
    if decoding.top_k and decoding.top_p == 1:
        assert (counts == decoding.top_k).all()


@pytest.mark.parametrize("name", THOUGHT)
def test_thinking_is_closed_at_its_budget_and_the_answer_goes_on(answers, name):
    budget, num_forced = THOUGHT[name].thinking_budget, 0
    for completion in answers[name][0]:
        tokens = completion.tokens.tolist()
        forced = np.zeros(len(tokens), bool) if completion.forced is None else completion.forced
        assert np.array_equal(forced, forced_closings(THINKING, completion.tokens, ThinkingTags(START, END), budget))
        first_end = tokens.index(END) if END in tokens else len(tokens)
        assert first_end <= budget or START in tokens[:budget]
        num_forced += int(forced.sum())
        assert len(tokens) == 24 or completion.stop_reason == "stop"
    assert num_forced >= 3, "it closes few by itself"


def test_greedy_answers_have_no_mask(answers):
    assert {completion.mask for completion in answers["greedy"][0]} == {None}


def test_an_answer_ends_with_its_stop_string_as_it_was_sampled(answers):
    """Cut behind the token that completes the text; the text is in the answer, and no end token."""
    whole, stopped = answers["none"][0][0], answers["stop"][0][0]
    assert stopped.stop_reason == "stop_string" and 0 < len(stopped.tokens) <= 6
    assert np.array_equal(stopped.tokens, whole.tokens[: len(stopped.tokens)])
    np.testing.assert_allclose(stopped.logprobs, whole.logprobs[: len(stopped.tokens)], atol=1e-5)
