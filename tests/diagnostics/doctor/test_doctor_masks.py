"""Errors in masks, penalties and routed experts, planted into a started mesh: the doctor names the wrong one alone."""

import re
import sys
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
from test_doctor import Plant, Ward, set_on, wrong

from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.text.thinking import ThinkingTags
from titan_rl.data.types import Decoding, Group, Layout, Provenance, Rollout, Turn
from titan_rl.diagnostics.doctor.check_errors import CheckFailed
from titan_rl.diagnostics.doctor.checks.tokens import check_marks, check_mask, check_penalties, check_starts
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers.penalties import penalized_tokens

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[set_on.__module__])


def with_supports(change):
    """Plant of masks made of ``change(supports)``."""

    def put(engine):
        from titan_rl.generator import vllm_requests as module

        made = module.SamplingMask

        class Changed:
            @staticmethod
            def of(supports, num_words):
                return made.of(change(supports), num_words)

        return set_on(module, "SamplingMask", Changed)

    return put


def without_one(supports):
    """One id of each set is lost, whichever it is."""
    return [support[1:] if len(support) > 1 else support for support in supports]


def shifted(supports):
    return supports[1:] + supports[:1]


def counted(change):
    """Plant of places, and of where answers begin, made of ``change(place_S, start_S)``."""

    def put(learner):
        from dataclasses import replace

        from titan_rl.models.layers import penalties as module

        plain = module._answers

        def changed(sample, first_row):
            place_S, start_S = change(sample.place_S, sample.start_S)
            return plain(replace(sample, place_S=place_S, start_S=start_S), first_row)

        return set_on(module, "_answers", changed)

    return put


def with_experts(change):
    """Plant of routed experts made of ``change(experts_TLK)``."""

    def put(engine):
        from titan_rl.generator import engine as module

        plain = module.routed_experts
        return set_on(module, "routed_experts", lambda *arguments: change(plain(*arguments)))

    return put


def lost(experts_TLK):
    """The last token's experts are not recorded."""
    experts_TLK = experts_TLK.copy()
    experts_TLK[-1] = 255
    return experts_TLK


PLANTS = {
    "experts are another token's": Plant("generators", with_experts(lambda each: np.roll(each, 1, 0)), "routing"),
    "experts are another layer's": Plant("generators", with_experts(lambda each: each[:, ::-1]), "routing"),
    "experts of a token are lost": Plant("generators", with_experts(lost), "routing"),
    "an id is lost": Plant("generators", with_supports(without_one), "sampling-mask"),
    "masks are shifted by a token": Plant("generators", with_supports(shifted), "sampling-mask"),
    "counts lack the last token": Plant("trainer", counted(lambda place, start: (place - 1, start)), "penalties"),
    "a prompt's end counts as written": Plant("trainer", counted(lambda place, start: (place, start - 1)), "penalties"),
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    sampled = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "top_p": 0.9, "top_k": 50}
    folder = tmp_path_factory.mktemp("ward")
    make_tiny(folder / "model", seed=1, architecture="qwen3_moe", num_layers=2, tie_word_embeddings=False)
    model = {"model": {"path": str(folder / "model")}, "algorithm": {"routing": "replay"}}
    ward = Ward(load_config("grpo_tiny", {"rollout": sampled | penalties} | model), folder)
    yield ward
    ward.close()


@pytest.mark.slow
def test_a_run_with_masks_and_penalties_is_healthy(ward):
    findings = ward.examine()
    assert not wrong(findings)
    statuses = {finding.check.name: finding.status for finding in findings}
    assert statuses["penalties"] == statuses["sampling-mask"] == statuses["routing"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_an_error_is_named(ward, name):
    found = wrong(ward.examine(PLANTS[name]))
    assert set(found) == {PLANTS[name].check}, found


def test_a_rollout_says_its_penalties():
    penalized = replace(rollout(None), penalties=Penalties(1.2))
    check_penalties(penalized, Penalties(1.2))
    check_penalties(rollout(None), None)
    for one, wanted in ((penalized, None), (rollout(None), Penalties(1.2)), (penalized, Penalties(1.1))):
        with pytest.raises(CheckFailed, match="penalties are not where they should be"):
            check_penalties(one, wanted)


def rollout(mask: SamplingMask | None) -> Rollout:
    tokens, kinds = np.array([5, 6, 7], np.int32), np.array([Provenance.TEMPLATE, 1, 1], np.int8)
    return Rollout("a", 0, tokens, kinds, np.zeros(3), np.zeros(3), [Turn(1, 3, "stop")], "ok", mask=mask)


def conversation(sample: int, penalties: Penalties | None = None) -> Rollout:
    """Two answers, and in a branch behind another prompt a third one."""
    tokens = np.array([5, 6, 7, 8, 9, 10, 11, 5, 6, 12, 13], np.int32) + sample
    kinds = np.array([0, 1, 1, 2, 1, 1, 1, 0, 0, 1, 1], np.int8)
    turns = [Turn(1, 3, "stop"), Turn(4, 7, "stop"), Turn(9, 11, "stop")]
    columns = dict(turns=turns, status="ok", reward=float(sample), branches=[0, 7], penalties=penalties)
    return Rollout("a", sample, tokens, kinds, np.zeros(11, np.float32), np.zeros(11, np.int32), **columns)


def test_penalties_count_from_the_answer_that_a_token_is_in():
    groups = [Group("a", [conversation(sample, Penalties(1.2)) for sample in range(2)])]
    [batch] = step_batches(groups, GRPO(), Config(), Layout(1, 64))
    check_starts(groups, batch)
    [row] = batch.rows[0]
    assert [tokens.start_S.tolist() for tokens in penalized_tokens(row)] == [[1, 1, 4, 4, 4], [2, 2]] * 2
    early = replace(row.penalized[0], starts=(1,))
    wrong = replace(batch, rows=[[replace(row, penalized=[early, *row.penalized[1:]])]])
    with pytest.raises(CheckFailed, match="elsewhere") as caught:
        check_starts(groups, wrong)
    assert caught.value.evidence == "token 4 of a sample 0 is in the answer from 4 on, and counts from 1"


@pytest.mark.parametrize(
    ("tokens", "kinds", "fault"),
    [
        ([5, 1, 8, 2, 7], [0, 1, 1, 4, 1], ""),
        ([5, 1, 8, 2, 7], [0, 1, 1, 1, 1], "token 3 of a sample 0 .id 2. is marked as the model's"),
        ([5, 1, 8, 2, 7], [0, 1, 1, 4, 4], "token 4 of a sample 0 .id 7. is not marked as the model's"),
        ([5, 1, 8, 9, 7], [0, 1, 1, 1, 1], "goes on thinking beyond a budget of 1 tokens"),
    ],
)
def test_marks_of_forced_tokens_are_not_believed(tokens, kinds, fault):
    turns, tags = [Turn(1, 5, "stop")], ThinkingTags(1, 2)
    columns = np.array(tokens, np.int32), np.array(kinds, np.int8), np.zeros(5), np.zeros(5)
    one = Rollout("a", 0, *columns, turns, "ok")
    if not fault:
        assert check_marks(one, tags, 1).tolist() == [False, True, True, False, True]
        return
    with pytest.raises(CheckFailed) as caught:
        check_marks(one, tags, 1)
    assert re.search(fault, caught.value.evidence)


@pytest.mark.parametrize(
    ("supports", "decoding", "fault"),
    [
        ([[], [2, 6], [7]], Decoding(top_k=2), ""),
        (None, Decoding(), ""),
        (None, Decoding(top_p=0.9), "has no sampling mask"),
        ([[], [2, 6], [7]], Decoding(), "nothing is cut away"),
        ([[], [2, 6]], Decoding(top_k=2), "2 and 3"),
        ([[], [7], [2, 6]], Decoding(top_k=2), r"token 1 of a sample 0 \(id 6\) was sampled from \[7\]"),
    ],
)
def test_masks_by_themselves(supports, decoding, fault):
    mask = None if supports is None else SamplingMask.of([np.array(each, np.int32) for each in supports], 99)
    if not fault:
        return check_mask(rollout(mask), decoding)
    with pytest.raises(CheckFailed, match=fault):
        check_mask(rollout(mask), decoding)
