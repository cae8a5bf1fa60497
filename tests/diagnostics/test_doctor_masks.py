"""Errors in sampling masks and penalties, planted into a started mesh: the doctor names the one at fault alone."""

import sys
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
from test_doctor import Plant, Ward, set_on, wrong

from titan_rl.config.load import load_config
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.types import Decoding, Provenance, Rollout, Turn
from titan_rl.diagnostics.doctor.checks.tokens import check_mask, check_penalties
from titan_rl.diagnostics.doctor.findings import CheckFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[set_on.__module__])


def with_supports(change):
    """Plant of masks made of ``change(supports)``."""

    def put(engine):
        from titan_rl.generator import engine as module

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


PLANTS = {
    "an id is lost": Plant("generators", with_supports(without_one), "sampling-mask"),
    "masks are shifted by a token": Plant("generators", with_supports(shifted), "sampling-mask"),
    "counts lack the last token": Plant("trainer", counted(lambda place, start: (place - 1, start)), "penalties"),
    "a prompt's end counts as written": Plant("trainer", counted(lambda place, start: (place, start - 1)), "penalties"),
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    sampled = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "top_p": 0.9, "top_k": 50}
    tables = {"rollout": sampled | penalties}
    ward = Ward(load_config("grpo_tiny", tables), tmp_path_factory.mktemp("ward"))
    yield ward
    ward.close()


@pytest.mark.slow
def test_a_run_with_masks_and_penalties_is_healthy(ward):
    findings = ward.examine()
    assert not wrong(findings)
    statuses = {finding.check.name: finding.status for finding in findings}
    assert statuses["penalties"] == statuses["sampling-mask"] == "passed"


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
